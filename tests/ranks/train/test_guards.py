"""The guards with real ranks: memory that is short in a control group (F6), and a loss that diverges (F5)."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.errors import ExitCode
from hpctrain.supervise import read_attempts
from tests.memory_group import in_group, memory_group
from tests.ranks_launcher import CommandResult, run_command
from tests.run_files import losses_of, records_of, summary_of
from tests.runbook import is_shown

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
LAUNCH = [HPCTRAIN, "launch", "-n", "2", "--"]
TRAIN = ["hpctrain", "train", "recipe.toml"]
# Two ranks need some 2.8 GB with their whole share of the batch at once, and less than half of this with little of it.
GROUP_BYTES = 2_000_000_000
# Of one of three ranks, for its samples: it needs some 700 MB for its whole share, less than half of this for little.
RANK_BYTES = 430_000_000
F5, F6 = "f5-divergence.md", "f6-out-of-memory.md"
RECIPE = """
[run]
name = "guarded"
directory = "{name}"
steps = 6
[task]
target = "tests.faults.faulty_tasks:{task}"
[data]
train = "data/train"
global_batch = 1024
[optimizer]
lr = 1e-3
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("guards")
    run_command(None, [HPCTRAIN, "data", "pack", "digits", "data"], cwd=where, expect=0)
    (where / "recipe.toml").write_text(RECIPE.format(name="run", task="Hungry"))
    return where


def train(
    argv: Sequence[str], *words: str, where: Path, name: str, expect: int = 0, num_ranks: int | None = None
) -> CommandResult:
    sets = [word for text in (f"run.directory={name}", *words) for word in ("--set", text)]
    return run_command(num_ranks, [*argv, *sets], cwd=where, timeout_s=300, expect=expect)


def losses(where: Path, name: str) -> np.ndarray[Any, Any]:
    """The loss of each step; of a step that was repeated, the later one."""
    return np.array(list(losses_of(where / name).values()))


def shown(line: str, *, page: str, name: str) -> bool:
    """Whether the page shows the line, which names this host and the run directory, and one rank or several."""
    line = re.sub(r"\branks? [\d, -]+ on \S+ ", "ranks 0-1 on vm ", line)
    return is_shown(line.replace(f"{name}/", "run/"), page=page)


# ---------------------------------------------------------------------- out of memory, F6


@pytest.fixture(scope="module")
def roomy(where: Path) -> np.ndarray[Any, Any]:
    """The losses of the run that had room."""
    train([HPCTRAIN, *TRAIN[1:]], where=where, name="roomy", num_ranks=2)
    assert summary_of(where / "roomy")["micro_batches"] == 1
    return losses(where, "roomy")


def differs(where: Path, name: str, roomy: np.ndarray[Any, Any]) -> float:
    """Returns the largest relative difference of the losses."""
    found = losses(where, name)
    assert len(found) == len(roomy)
    return float(np.abs(found / roomy - 1).max())


def test_in_a_small_control_group_it_goes_on_in_smaller_parts_with_the_same_losses_and_remembers(
    where: Path, roomy: np.ndarray[Any, Any]
) -> None:
    with memory_group(GROUP_BYTES) as group:
        argv = in_group(group, [*LAUNCH, *TRAIN])
        share = "guards.host_memory=share"
        first = train(argv, share, "run.steps=3", where=where, name="small")
        before = summary_of(where / "small")
        second = train(argv, share, where=where, name="small")
        after = summary_of(where / "small")
    out_of_memory = [line for line in first.stdout.splitlines() if "ran out of memory, asking" in line]
    assert len(out_of_memory) == before["out_of_memory"] > 0, first.stdout
    assert all(shown(line, page=F6, name="small") for line in out_of_memory), out_of_memory
    assert before["micro_batches"] == 2 ** len(out_of_memory)
    (note,) = [line for line in first.stdout.splitlines() if line.startswith("note: each rank may use ")]
    assert shown(note, page=F6, name="small"), note
    assert (after["micro_batches"], after["out_of_memory"]) == (before["micro_batches"], 0)
    remembered = [line for line in second.stdout.splitlines() if line.startswith("micro-batches: ")]
    assert len(remembered) == 1, second.stdout
    assert shown(remembered[0], page=F6, name="small"), remembered
    assert differs(where, "small", roomy) < 1e-5


def test_after_the_kernel_killed_a_rank_the_supervisors_next_attempt_divides_the_batch_at_once(
    where: Path, roomy: np.ndarray[Any, Any]
) -> None:
    with memory_group(GROUP_BYTES) as group:
        supervise = [HPCTRAIN, "supervise", "-n", "2", "--", *TRAIN]
        done = train(in_group(group, supervise), where=where, name="killed")
    attempts = read_attempts(where / "killed")
    causes = [attempt.cause.value if attempt.cause else "" for attempt in attempts]
    num_killed = len(attempts) - 1
    assert num_killed > 0, done.stderr
    assert causes == ["out of memory"] * num_killed + ["finished"], done.stderr
    assert [attempt.exit_code for attempt in attempts] == [137] * num_killed + [0]
    assert summary_of(where / "killed")["micro_batches"] == 2**num_killed
    divided = [line for line in done.stdout.splitlines() if line.startswith("micro-batches: ")]
    assert len(divided) == num_killed, done.stdout
    assert all(shown(line, page=F6, name="killed") for line in divided), divided
    assert differs(where, "killed", roomy) < 1e-5


def test_one_of_three_ranks_with_less_memory_makes_all_divide(
    where: Path, roomy: np.ndarray[Any, Any]
) -> None:
    task = (
        "task.target=tests.faults.faulty_tasks:HungryOnARankWithLittle",
        f"task.options.room={RANK_BYTES}",
    )
    done = train([HPCTRAIN, *TRAIN[1:]], *task, where=where, name="one-of-three", num_ranks=3)
    out_of_memory = [line for line in done.stdout.splitlines() if "ran out of memory, asking" in line]
    assert out_of_memory, done.stdout
    named = f"step 1: rank 1 on {socket.gethostname()} ran"
    assert all(line.startswith(named) for line in out_of_memory), out_of_memory
    found = summary_of(where / "one-of-three")
    assert found["micro_batches"] == 2 ** len(out_of_memory)
    assert differs(where, "one-of-three", roomy) < 1e-5


# ---------------------------------------------------------------------- divergence, F5

DIVERGING = (
    "task.target=tests.faults.faulty_tasks:Spoilt",
    "data.global_batch=16",
    "checkpoint.every_steps=10",
)
LIMITS = ("guards.loss_window=10", "optimizer.max_skipped_in_row=3", "guards.max_roll_backs=1")


def test_nan_and_a_jump_are_skipped_on_all_a_lasting_one_is_rolled_back_and_the_limit_ends_with_7(
    where: Path,
) -> None:
    spoilt = 'task.options.spoilt=[[1, 12, 12, "nan"], [0, 25, 25, "1e9"], [1, 40, 43, "1e9"]]'
    done = train(
        [HPCTRAIN, *TRAIN[1:]], *DIVERGING, *LIMITS, spoilt, "run.steps=60",
        where=where, name="diverging", num_ranks=2,
    )  # fmt: skip
    found = summary_of(where / "diverging")
    assert (found["status"], found["roll_backs"], found["lr_factor"]) == ("finished", 1, 0.5)
    records = records_of(where / "diverging")
    skipped = [record["step"] for record in records if not record["applied"]]
    assert skipped == [12, 25, 40, 41, 42]  # with step 43 it is one too many, which has no record
    assert [record["step"] for record in records] == [*range(1, 43), *range(31, 61)]
    assert [record["lr"] for record in records] == [1e-3] * 42 + [5e-4] * 30
    other = records_of(where / "diverging", rank=1)
    for key in ("step", "loss", "grad_norm", "lr", "applied"):
        assert [record[key] for record in other] == [record[key] for record in records]
    lines = done.stdout.splitlines()
    events = [line for line in lines if " is skipped on all ranks: " in line or " rolled back to " in line]
    assert [line.split()[1] for line in events] == ["25", "40", "43:"], done.stdout
    assert all(shown(line, page=F5, name="diverging") for line in events), events

    # The next start knows that the one roll-back is used up, and the rate.
    lasting = 'task.options.spoilt=[[1, 5, 1000, "nan"]]'
    ended = train(
        [HPCTRAIN, *TRAIN[1:]], *DIVERGING, *LIMITS, lasting, "run.steps=100",
        where=where, name="diverging", num_ranks=2, expect=ExitCode.DIVERGED,
    )  # fmt: skip
    said = [line for line in ended.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == 1, ended.stderr
    assert shown(said[0], page=F5, name="diverging"), said
    found = summary_of(where / "diverging")
    assert (found["status"], found["roll_backs"]) == ("diverged", 1)
    last = records_of(where / "diverging")[-1]
    assert (last["step"], last["lr"], last["applied"]) == (67, 5e-4, False)
