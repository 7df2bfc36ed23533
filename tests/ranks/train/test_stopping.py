"""Signals to one rank at any moment: one agreed step, code 75, an exact resume; a second one leaves; no hang."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.ranks_launcher import Launched, start_command
from tests.states import wait_for
from tests.stop_trials import MARK, StopTrials, moments_of, ranks_marked

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
NUM_RANKS = 2


class Ranks:
    """Ranks that mpirun has started."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched

    @property
    def output(self) -> str:
        return self.launched.stdout + self.launched.stderr

    def wait(self, *, timeout_s: float) -> int:
        return self.launched.wait(timeout_s=timeout_s).returncode


@contextmanager
def start(arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[Ranks]:
    # Signals are blocked from the first instruction: Python takes a moment to come to our code, which blocks them too.
    held = ["env", "--block-signal=USR1,TERM"]
    command = [*held, HPCTRAIN, "train", *arguments]
    with start_command(NUM_RANKS, command, env=environ, cwd=folder) as launched:
        yield Ranks(launched)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> StopTrials:
    return StopTrials(start, num_ranks=NUM_RANKS, directory=tmp_path_factory.mktemp("trials"), seed=7)


def test_a_signal_to_one_rank_at_any_moment_stops_all_at_one_step_and_the_resume_is_exact(
    trials: StopTrials,
) -> None:
    outcome = trials.run(moments_of(3))
    print(outcome.describe())
    assert outcome.num_signals == 3
    assert outcome.num_stops >= 2  # one may have come after the last step
    assert outcome.num_runs >= 1


def test_a_second_signal_ends_ranks_that_wait_for_one_that_hangs(trials: StopTrials) -> None:
    """Rank 1 does not come to its fifth step; rank 0 waits inside MPI, where no Python code of its main thread runs."""
    folder = trials.directory
    words = ["recipe.toml", "--set", "run.directory=hangs", "--set", "checkpoint.limit_mb_per_s=100.0"]
    words += ["--set", "task.target=tests.faults.faulty_tasks:OneRankSleeps"]
    words += ["--set", "task.options={width=4}", "--set", "checkpoint.every_steps=100"]
    with start(words, folder, {MARK: "hangs", "SEEN": str(folder)}) as ranks:
        metrics = folder / "hangs" / "metrics" / "rank-00000.jsonl"
        wait_for(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, says=lambda: ranks.output
        )
        time.sleep(0.5)
        pid = ranks_marked("hangs")[0]
        os.kill(pid, signal.SIGTERM)
        time.sleep(2.5)
        assert set(ranks_marked("hangs")) == {0, 1}
        os.kill(pid, signal.SIGTERM)
        sent_s = time.monotonic()
        code = ranks.wait(timeout_s=300)
        assert time.monotonic() - sent_s < 100  # the other rank would sleep for an hour
        assert code == 128 + signal.SIGTERM, ranks.output
        ends = r"SIGTERM, [0-9.]+ s after SIGTERM: ending at once, nothing more is saved \(exit code 143\)"
        assert re.search(ends, ranks.output), ranks.output
        wait_for(lambda: not ranks_marked("hangs"), says=lambda: ranks.output)


def test_another_signal_stops_where_the_recipe_says_so(trials: StopTrials) -> None:
    folder = trials.directory
    words = ["recipe.toml", "--set", "run.directory=other", "--set", 'stop.signals=["SIGUSR2"]']
    words += ["--set", "checkpoint.signal=SIGUSR1", "--set", "checkpoint.every_steps=100"]
    words += ["--set", "task.options.step_s=0.2"]
    (folder / "seen-other").mkdir()
    with start_command(
        None,
        [HPCTRAIN, "launch", "-n", "2", "--stop-signal", "SIGUSR2", "--", "hpctrain", "train", *words],
        env={MARK: "other", "SEEN": str(folder / "seen-other")}, cwd=folder,
    ) as launched:  # fmt: skip
        ranks = Ranks(launched)
        wait_for(lambda: "\nstep " in ranks.output, says=lambda: ranks.output)
        launched.process.send_signal(signal.SIGUSR1)  # asks for a checkpoint and no more
        wait_for(
            lambda: list((folder / "other" / "checkpoints").glob("step-*.h5")), says=lambda: ranks.output
        )
        launched.process.send_signal(signal.SIGTERM)
        code = ranks.wait(timeout_s=300)
        assert code == ExitCode.STOPPED_EARLY, ranks.output
        assert "asking the ranks to save and stop (SIGUSR2)" in ranks.output
        assert "(SIGUSR2); the state is saved and verified" in ranks.output
    shutil.rmtree(folder / "other")
