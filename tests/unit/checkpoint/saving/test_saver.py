"""Saves in the background: training changes its state meanwhile, and all ranks learn how it went."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import (
    Best,
    Replicated,
    Retention,
    SaveOptions,
    State,
    load,
    load_newest_good,
    open_checkpoint,
)
from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.saving.background import BackgroundThread
from hpctrain.checkpoint.saving.save import SaveResult
from hpctrain.checkpoint.saving.saver import SaveMode, Saver, WhenBusy, saving_into
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError, StoppedEarly, UsageError
from tests.ranks_launcher import REPOSITORY

# 2 MB take long enough to do something meanwhile; in parts, since a limit counts between them.
SLOW = SaveOptions(limit_mb_per_s=10.0)


def weights(value: float) -> torch.Tensor:
    return torch.full((8, 62_500), value)


def state_with(tensor: torch.Tensor, **document: object) -> State:
    items = [Replicated(name=f"weight.{row}", tensor=part) for row, part in enumerate(tensor)]
    return State(items=items, document=document)


def saver_into(
    directory: Path,
    *,
    comm: Collective | None = None,
    options: SaveOptions = SLOW,
    mode: SaveMode = SaveMode.ASYNC,
    when_busy: WhenBusy = WhenBusy.WAIT,
    saved: list[SaveResult] | None = None,
) -> Saver:
    comm = comm or SerialWorld()
    begin = saving_into(directory, comm=comm, options=options)
    reported: list[SaveResult] = saved if saved is not None else []
    return Saver(begin, comm=comm, mode=mode, when_busy=when_busy, on_saved=reported.append)


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def content_of(path: Path) -> float:
    _, tensors = load(path, comm=SerialWorld())
    values = torch.cat(list(tensors.values())).unique()
    assert len(values) == 1
    return float(values)


# ---------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, num_ranks: int) -> None:
    def rank_main(comm: Collective) -> SaveResult:
        tensor = weights(1.0)
        saved: list[SaveResult] = []
        with saver_into(tmp_path, comm=comm, saved=saved) as saver:
            assert saver.save(state_with(tensor), step=5)
            tensor.fill_(2.0)  # the next step of training
            assert saver.in_flight_step == 5
        assert saver.in_flight_step is None
        return saved[0]

    found = run_threads(num_ranks, rank_main, timeout_s=300)
    assert content_of(tmp_path / "step-00000005.h5") == 1.0
    for saved in found:
        assert saved.step == 5
        assert saved.path == tmp_path / "step-00000005.h5"
        assert 0 < saved.stall_s <= saved.seconds
        assert saved.mb_per_s == pytest.approx(saved.bytes / 1e6 / saved.seconds)


@pytest.mark.timing
def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    saved: list[SaveResult] = []
    saver = saver_into(tmp_path, options=SaveOptions(limit_mb_per_s=4.0), saved=saved)
    saver.save(state_with(weights(1.0)), step=1)
    assert not saver.ready()  # 2 MB at 4 MB/s
    went_on_s = 0.0
    while not saved:
        started_s = time.monotonic()
        while not saver.ready():
            time.sleep(0.01)
        went_on_s += time.monotonic() - started_s
        saver.advance()
    assert went_on_s > 0.2
    assert saved[0].stall_s <= saved[0].seconds - went_on_s
    saver.close()


def test_the_vote_commits_it_while_the_ranks_go_on(tmp_path: Path) -> None:
    def rank_main(comm: Collective) -> int:
        saved: list[SaveResult] = []
        saver = saver_into(tmp_path, comm=comm, saved=saved)
        saver.poll()  # nothing in flight: nothing is communicated
        saver.save(state_with(weights(1.0)), step=1)
        steps = 0
        while not saved:
            saver.poll()
            time.sleep(0.01 * comm.rank)  # ranks are not alike
            steps += 1
        saver.close()
        return steps

    steps = run_threads(3, rank_main, timeout_s=300)
    assert len(set(steps)) == 1  # after the same step on all
    assert steps[0] > 2
    assert steps_in(tmp_path) == ["step-00000001.h5"]


def test_memory_for_the_copy_is_the_ranks_share_and_is_used_again(tmp_path: Path) -> None:
    def rank_main(comm: Collective) -> set[int]:
        found = set()
        with saver_into(tmp_path, comm=comm, options=SaveOptions()) as saver:
            for step in range(3):
                saver.save(state_with(weights(float(step))), step=step)
                found.add(saver.buffer_bytes)
        return found

    for sizes in run_threads(2, rank_main, timeout_s=300):
        (num_bytes,) = sizes
        assert num_bytes <= 1.05 * weights(0).nbytes / 2


def test_saving_at_once_copies_nothing(tmp_path: Path) -> None:
    with saver_into(tmp_path, mode=SaveMode.SYNC, options=SaveOptions()) as saver:
        saver.save(state_with(weights(1.0)), step=1)
        assert saver.in_flight_step is None
        assert saver.buffer_bytes == 0
        assert steps_in(tmp_path) == ["step-00000001.h5"]


# ---------------------------------------------------------------------- at most one in flight


def test_a_second_one_waits_for_the_first(tmp_path: Path) -> None:
    saved: list[SaveResult] = []
    with saver_into(tmp_path, saved=saved) as saver:
        saver.save(state_with(weights(1.0)), step=1)
        assert saver.save(state_with(weights(2.0)), step=2)
        assert [s.step for s in saved] == [1]
        assert steps_in(tmp_path)[-1] == "step-00000001.h5"
    assert [s.step for s in saved] == [1, 2]
    assert content_of(tmp_path / "step-00000002.h5") == 2.0


def test_or_is_skipped_as_configured(tmp_path: Path) -> None:
    with saver_into(tmp_path, when_busy=WhenBusy.SKIP) as saver:
        assert saver.save(state_with(weights(1.0)), step=1)
        assert saver.would_skip
        assert not saver.save(state_with(weights(2.0)), step=2)
        saver.finish()
        assert not saver.would_skip
        assert saver.save(state_with(weights(3.0)), step=3)
    assert steps_in(tmp_path) == ["step-00000001.h5", "step-00000003.h5"]


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_error_in_the_background_is_raised_by_the_next_call_on_all_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    directory = tmp_path / "checkpoints"

    def rank_main(comm: Collective) -> str:
        saver = saver_into(directory, comm=comm)
        saver.save(state_with(weights(1.0)), step=1)
        saver.finish()
        saver.save(state_with(weights(2.0)), step=2)
        while not saver.ready():
            time.sleep(0.01)
        comm.barrier()
        if comm.rank == 0:  # the disk is taken away before the commit
            directory.rename(tmp_path / "away")
        comm.barrier()
        with pytest.raises(CheckpointError) as caught:
            saver.finish()
        comm.barrier()
        if comm.rank == 0:
            (tmp_path / "away").rename(directory)
        comm.barrier()
        assert saver.save(state_with(weights(3.0)), step=3)  # the saver itself is as good as before
        saver.close()
        return str(caught.value)

    texts = run_threads(num_ranks, rank_main, timeout_s=300)
    assert len(set(texts)) == 1
    assert "step-00000002" in texts[0]
    assert steps_in(directory) == ["step-00000001.h5", "step-00000003.h5"]
    assert content_of(directory / "step-00000001.h5") == 1.0


def save_and_fail(saver: Saver, error: Exception) -> None:
    with saver:
        saver.save(state_with(weights(1.0)), step=1)
        raise error


def test_an_error_that_all_ranks_share_still_commits_what_is_in_flight(tmp_path: Path) -> None:
    with pytest.raises(StoppedEarly):
        save_and_fail(saver_into(tmp_path), StoppedEarly("asked to", agreed=True))
    assert steps_in(tmp_path) == ["step-00000001.h5"]


def test_where_that_fails_too_it_is_reported_and_the_first_error_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = saver_into(tmp_path / "checkpoints")

    def fail() -> None:
        with saver:
            saver.save(state_with(weights(1.0)), step=1)
            (tmp_path / "checkpoints").rename(tmp_path / "away")
            raise StoppedEarly("asked to", agreed=True)

    with pytest.raises(StoppedEarly):
        fail()
    assert "the checkpoint of step 1 was not saved" in capsys.readouterr().err


def test_an_error_of_one_ranks_own_does_not_wait_for_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    options = SaveOptions(limit_mb_per_s=0.01)  # 200 seconds
    with pytest.raises(KeyError):
        save_and_fail(saver_into(tmp_path, options=options), KeyError("a bug"))
    assert time.monotonic() - started < 100
    assert finished_newest_first(tmp_path) == []


def test_after_it_was_closed_nothing_is_saved(tmp_path: Path) -> None:
    saver = saver_into(tmp_path, options=SaveOptions())
    saver.close()
    saver.close()
    with pytest.raises(UsageError, match="cannot save step 7: this Saver is closed"):
        saver.save(state_with(weights(1.0)), step=7)


# ---------------------------------------------------------------------- the end of the program

SCRIPT = """
import sys, torch
from hpctrain.checkpoint import Replicated, SaveOptions, State
from hpctrain.checkpoint.saving.saver import Saver, saving_into
from hpctrain.comm.backends.serial_world import SerialWorld

comm = SerialWorld()
saver = Saver(saving_into(sys.argv[1], comm=comm, options=SaveOptions(limit_mb_per_s=10)), comm=comm, mode="async")
items = [Replicated(name=f"weight.{{row}}", tensor=torch.full((62_500,), 1.0)) for row in range(8)]
saver.save(State(items=items), step=1)
assert not saver.ready()
{end}
"""


def run_script(directory: Path, end: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "error", "-c", SCRIPT.format(end=end), str(directory)]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_the_end_of_a_program_waits_for_the_checkpoint(tmp_path: Path) -> None:
    done = run_script(tmp_path, "")
    assert done.returncode == 0, done.stderr
    assert steps_in(tmp_path) == ["step-00000001.h5"]
    assert content_of(tmp_path / "step-00000001.h5") == 1.0


def test_a_program_that_fails_leaves_at_most_a_partial_one_which_the_next_save_removes(
    tmp_path: Path,
) -> None:
    done = run_script(tmp_path, "raise KeyError('a bug')")
    assert done.returncode == 1
    assert "a bug" in done.stderr
    assert load_newest_good(tmp_path, comm=SerialWorld()) is None
    with saver_into(tmp_path, options=SaveOptions()) as saver:
        saver.save(state_with(weights(2.0)), step=2)
    assert steps_in(tmp_path) == ["step-00000002.h5"]


# ---------------------------------------------------------------------- the thread


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_the_background_thread_has_a_lower_priority_than_training() -> None:
    thread = BackgroundThread(name="test")
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    theirs = thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(10)
    assert theirs == min(19, mine + 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
    thread.shutdown()


def test_an_error_in_the_thread_is_the_results_and_the_thread_goes_on() -> None:
    thread = BackgroundThread(name="test")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result(10)
    assert thread.submit(lambda: 3).result(10) == 3
    thread.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(lambda: 3)


# ---------------------------------------------------------------------- what is kept


def save_with_quality(saver: Saver, step: int, accuracy: float) -> None:
    saver.save(state_with(torch.zeros(1, 3), quality={"accuracy": accuracy}), step=step)


@pytest.mark.parametrize("files", [1, 2])
def test_the_best_by_its_metric_stays_and_files_and_folders_go(tmp_path: Path, files: int) -> None:
    options = SaveOptions(keep=Retention(last=1, best=Best(metric="accuracy", mode="max")), files=files)
    name = "step-{:08}" + (".h5" if files == 1 else "")

    def rank_main(comm: Collective) -> None:
        with saver_into(tmp_path, comm=comm, mode=SaveMode.SYNC, options=options) as saver:
            for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.7)):
                save_with_quality(saver, step, accuracy)

    run_threads(2, rank_main, timeout_s=300)
    assert steps_in(tmp_path) == [name.format(2), name.format(4)]
    for path in finished_newest_first(tmp_path):
        open_checkpoint(path, comm=SerialWorld())


def test_of_a_checkpoint_that_lies_elsewhere_only_the_link_is_deleted(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    saved: list[SaveResult] = []
    with saver_into(run, mode=SaveMode.SYNC, options=SaveOptions(keep=1, files=1), saved=saved) as saver:
        (run / "step-00000001").parent.mkdir()
        (run / "step-00000001").symlink_to(elsewhere)
        saver.save(state_with(torch.zeros(1, 3)), step=2)
    assert steps_in(run) == ["step-00000002.h5"]
    assert elsewhere.is_dir()
    assert "could not delete" not in saved[0].note


def test_what_cannot_be_read_is_kept_where_it_might_be_the_best(tmp_path: Path) -> None:
    saved: list[SaveResult] = []
    options = SaveOptions(keep=Retention(last=1, best=Best(metric="accuracy", mode="max")))
    with saver_into(tmp_path, mode=SaveMode.SYNC, options=options, saved=saved) as saver:
        save_with_quality(saver, 1, 0.1)
        shutil.copy(tmp_path / "step-00000001.h5", tmp_path / "step-00000000.h5")
        os.truncate(tmp_path / "step-00000000.h5", 5000)
        save_with_quality(saver, 2, 0.9)
    assert steps_in(tmp_path) == ["step-00000000.h5", "step-00000002.h5"]
    assert "kept step-00000000.h5, whose accuracy cannot be read" in saved[-1].note
