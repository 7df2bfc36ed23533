"""Elastic runs on this machine: they shrink and grow, lose no sample, and compute what stop-and-resume computes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import finished_newest_first, load
from hpctrain.comm import SerialWorld
from hpctrain.supervise import AttemptEnd
from tests.faults.elastic_task import NUM_SAMPLES, pack_numbered, samples_by_step
from tests.ranks_launcher import Launched, run_command, start_command
from tests.run_files import losses_of, newest, saved_steps
from tests.states import wait_for
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
MOST = 4
RECIPE = """
[run]
name = "elastic"
directory = "{directory}"
steps = {steps}
{run}
[task]
target = "tests.faults.elastic_task:WritesDownSamples"
options = {{ {options} }}
[data]
train = "data"
global_batch = 24
[optimizer]
name = "adamw"
lr = 1e-2
{optimizer}
[reduction]
algorithm = "{algorithm}"
[telemetry]
write_every_s = 0
[checkpoint]
every_steps = {every}
{checkpoint}
"""


def write_recipe(
    where: Path, *, steps: int, step_s: float = 0.05, directory: str = "run", options: str = "", every: int = 1000,
    run: str = "", optimizer: str = "", checkpoint: str = "", algorithm: str = "flat", name: str = "recipe.toml",
) -> None:  # fmt: skip
    options = ", ".join(filter(None, [f"step_s = {step_s}", options]))
    text = RECIPE.format(
        directory=directory, steps=steps, run=run, options=options, optimizer=optimizer, every=every,
        checkpoint=checkpoint, algorithm=algorithm,
    )  # fmt: skip
    (where / name).write_text(text)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    pack_numbered(tmp_path / "data")
    set_slots(tmp_path, 4)
    return tmp_path


def set_slots(where: Path, slots: int) -> None:
    partial = where / "slots.partial"
    partial.write_text(f"localhost slots={slots}\n")
    partial.rename(where / "slots")


def supervise(where: Path, *options: str, elastic: str = "2:4") -> Launched:
    words = [HPCTRAIN, "supervise", "--elastic", elastic, "--hostfile", "slots", *options]
    return start_command(None, [*words, "--", "hpctrain", "train", "recipe.toml"], cwd=where)


def trains(where: Path, *, attempt: int, steps: int = 4) -> Callable[[], bool]:
    """Whether the attempt has made so many steps."""

    def done() -> bool:
        found = attempts(where)
        if len(found) < attempt or found[attempt - 1].first_step is None:
            return False
        return max(losses_of(where / "run"), default=0) >= (found[attempt - 1].first_step or 0) + steps

    return done


def ranks_of_now(where: Path) -> list[int]:
    """The process of each rank of the newest attempt."""
    environment = json.loads((where / "run" / "environment.json").read_text())
    return [entry["pid"] for entry in environment["ranks"]]


def processes_of(where: Path, *, attempt: int) -> list[int]:
    """The processes that stand for the ranks of an attempt that may not have begun to train."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or (entry / "cwd").resolve() != where.resolve():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"HPCTRAIN_ATTEMPT={attempt}".encode() in variables and any(
                variable.startswith(b"OMPI_COMM_WORLD_RANK=") for variable in variables
            ):
                found.append(int(entry.name))
    return found


def parts_of(ranks: int) -> int:
    """Micro-batches of an attempt with so many ranks."""
    return -(-MOST // ranks)


def assert_each_sample_once(
    where: Path, *, steps: int, redone: int, parts: Callable[[int], int] = parts_of
) -> None:
    """The steps that count have seen each sample once in each epoch.

    redone: steps that a loss may have cost. parts: micro-batches of so many ranks.
    """
    found = attempts(where)
    counted: dict[int, list[int]] = {}
    for number, attempt in enumerate(found):
        if attempt.first_step is None:
            continue
        begun = samples_by_step(
            where, attempt=attempt.number, first_step=attempt.first_step, ranks=attempt.ranks,
            micro_batches=parts(attempt.ranks),
        )  # fmt: skip
        later = [other.first_step for other in found[number + 1 :] if other.first_step is not None]
        if later:
            # A step that was begun and not finished is not done again.
            most = 0 if attempt.cause is AttemptEnd.RESIZED else redone + 1
            assert max(begun) - later[0] <= most, (attempt, begun.keys())
        counted |= begun
    assert sorted(counted) == list(range(1, steps + 1))
    seen = [sample for step in range(1, steps + 1) for sample in counted[step]]
    for begin in range(0, len(seen), NUM_SAMPLES):
        epoch = seen[begin : begin + NUM_SAMPLES]
        assert len(set(epoch)) == len(epoch), f"epoch {begin // NUM_SAMPLES}"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load(path, comm=SerialWorld())[1]


def assert_same_as_stop_and_resume(
    where: Path, *, steps: int, algorithm: str = "flat", options: str = ""
) -> None:
    """A run that ends where the elastic run changed its ranks, and continues with as many, has the same bits."""
    stages = [attempt for attempt in attempts(where) if attempt.first_step is not None]
    ends = [*(stage.first_step or 0 for stage in stages[1:]), steps]
    write_recipe(
        where,
        steps=steps,
        step_s=0,
        directory="again",
        algorithm=algorithm,
        options=options,
        name="again.toml",
    )
    for stage, end in zip(stages, ends, strict=True):
        words = ["launch", "-n", str(stage.ranks), "--", "hpctrain", "train", "again.toml"]
        words += ["--set", f"run.steps={end}", "--set", f"data.micro_batches={parts_of(stage.ranks)}"]
        run_command(None, [HPCTRAIN, *words], cwd=where, timeout_s=300, expect=0)
    assert_same_run(where / "run", where / "again", steps=steps)


def assert_same_run(run: Path, expected: Path, *, steps: int) -> None:
    """Two runs have recorded the same losses, and saved the same tensors after their last step, to the bit."""
    assert losses_of(run) == losses_of(expected)
    found, wanted = (tensors_of(newest_checkpoint(directory)) for directory in (run, expected))
    assert saved_steps(run)[-1] == saved_steps(expected)[-1] == steps
    assert wanted.keys() == found.keys()
    for tensor, values in wanted.items():
        assert torch.equal(found[tensor], values), tensor


def newest_checkpoint(run: Path) -> Path:
    return finished_newest_first(run / "checkpoints")[0]


def kept_folders() -> set[Path]:
    """Folders of runs in which this user's ranks have kept state."""
    folder = Path("/dev/shm", f"hpctrain-kept-{os.getuid()}")
    return set(folder.iterdir()) if folder.is_dir() else set()


def test_it_goes_from_4_to_2_and_back_to_4_ranks_with_each_sample_once_and_the_bits_of_stop_and_resume(
    where: Path,
) -> None:
    before = kept_folders()
    steps = 60
    write_recipe(where, steps=steps)
    with supervise(where) as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        for pid in ranks_of_now(where)[2:]:
            os.kill(pid, signal.SIGKILL)
        set_slots(where, 2)
        wait_for(trains(where, attempt=2), launched=launched)
        set_slots(where, 4)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 0, result.stderr
    found = attempts(where)
    assert [attempt.ranks for attempt in found] == [4, 2, 4], result.stderr
    causes = [attempt.cause for attempt in found]
    assert causes == [AttemptEnd.LOST_RANK, AttemptEnd.RESIZED, AttemptEnd.FINISHED], result.stderr
    assert "keeps the state after step" in result.stderr
    assert "from 2 to 4 ranks" in result.stderr
    assert "the global batch (24) and the learning rate stay" in result.stderr
    assert "of its own" not in result.stderr
    assert found[0].steps_gained is not None
    assert found[0].steps_gained > 3  # although no checkpoint was due
    assert_each_sample_once(where, steps=steps, redone=1)
    assert_same_as_stop_and_resume(where, steps=steps)
    assert kept_folders() <= before  # nothing stays in memory


def test_a_rank_that_is_started_again_draws_the_random_numbers_that_it_would_have_drawn(where: Path) -> None:
    """The number of ranks is the same before and after the loss, so the generators continue, and so do buffers."""
    steps, options = 24, "dropout = 0.3, batch_norm = true"
    write_recipe(where, steps=steps, options=options)
    with supervise(where, elastic="2:3") as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        os.kill(ranks_of_now(where)[0], signal.SIGKILL)  # whose buffers are those of the run
        result = launched.wait(timeout_s=300)
    assert result.returncode == 0, result.stderr
    first, second = attempts(where)
    assert (first.ranks, second.ranks) == (3, 3)
    stopped = second.first_step
    assert stopped is not None
    assert stopped >= 4
    write_recipe(where, steps=steps, step_s=0, directory="again", options=options, name="again.toml")
    words = [HPCTRAIN, "launch", "-n", "3", "--", "hpctrain", "train", "again.toml", "--set"]
    run_command(None, [*words, f"run.steps={steps}"], cwd=where, timeout_s=300, expect=0)
    assert_same_run(where / "run", where / "again", steps=steps)


def test_a_second_loss_while_it_starts_again_is_another_loss_from_the_same_state(where: Path) -> None:
    steps = 24
    write_recipe(where, steps=steps)
    with supervise(where) as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        os.kill(ranks_of_now(where)[3], signal.SIGKILL)
        wait_for(lambda: len(attempts(where)) == 2, launched=launched)
        victims = wait_for(lambda: processes_of(where, attempt=2), launched=launched)
        assert attempts(where)[1].first_step is None
        os.kill(victims[0], signal.SIGKILL)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 0, result.stderr
    found = attempts(where)
    assert [attempt.cause for attempt in found[:2]] == [AttemptEnd.LOST_RANK] * 2, result.stderr
    assert found[2].first_step is not None
    assert found[2].first_step >= 4
    assert_each_sample_once(where, steps=steps, redone=1)
    assert_same_as_stop_and_resume(where, steps=steps)


def test_with_too_few_slots_it_stops_waits_and_ends_with_75_and_says_what_is_missing(where: Path) -> None:
    write_recipe(where, steps=100000)
    with supervise(where, "--elastic-wait-s", "2") as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        set_slots(where, 1)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 75, result.stderr
    (attempt,) = attempts(where)
    assert attempt.cause is AttemptEnd.RESIZED
    assert attempt.steps_lost == 0
    assert saved_steps(where / "run") == [attempt.last_step]
    assert "gives 1 slots on this machine, and at least 2 ranks are needed (--elastic 2:4)" in result.stderr
    assert "waiting up to 2 s for more" in result.stderr


def test_sigterm_while_it_grows_ends_it_with_its_state_saved(where: Path) -> None:
    set_slots(where, 2)
    write_recipe(where, steps=100000)
    with supervise(where) as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        set_slots(where, 4)
        wait_for(lambda: "asking the ranks to save and stop" in launched.stderr, launched=launched)
        launched.process.send_signal(signal.SIGTERM)
        result = launched.wait(timeout_s=300)
        assert set(launched.processes()) <= {launched.process.pid}
    assert result.returncode == 75, result.stderr
    found = attempts(where)
    assert all(attempt.ended is not None for attempt in found)
    run_command(None, [HPCTRAIN, "checkpoint", "verify", "run/checkpoints"], cwd=where, expect=0)
    assert max(saved_steps(where / "run")) == max(losses_of(where / "run"))


def test_with_a_batch_per_rank_the_learning_rate_follows_by_the_rule_of_the_recipe(where: Path) -> None:
    steps = 40
    set_slots(where, 2)
    optimizer = 'lr_scaling = "linear"\nreference_batch = 24'
    write_recipe(where, steps=steps, step_s=0.1, run='elastic_batch = "per-rank"', optimizer=optimizer)
    with supervise(where) as launched:
        wait_for(trains(where, attempt=1), launched=launched)
        set_slots(where, 4)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 0, result.stderr
    first, second = attempts(where)
    assert (first.ranks, second.ranks) == (2, 4)
    assert "6 samples per rank, so the global batch is 12; the learning rate follows it" in result.stderr
    assert second.first_step is not None
    rates = {step: record["lr"] for step, record in newest(where / "run", "step").items()}
    assert rates == {step: 0.005 if step <= second.first_step else 0.01 for step in range(1, steps + 1)}
    assert_each_sample_once(where, steps=steps, redone=0, parts=lambda ranks: 1)
