"""Many saves that are killed or fail, in forked children of one process: a start of torch for each would take
minutes. Run as `python -m tests.faults.checkpoint.trials DIRECTORY NAME`; prints one line of JSON.

With the library of `test_checkpoint_crashes.py` preloaded, the environment variable CHECKPOINT_FAULT makes
the n-th file operation of a child fail, be cut short, or kill it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, load_newest_good, save
from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first, partial_files
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError

NUM_RANKS = 2


def state_at(step: int, rank: int) -> State:
    rows = torch.full((1, 200_000), float(step + rank))
    return State(
        items=[
            Replicated(name="w", tensor=torch.arange(400_000, dtype=torch.float32) + step),
            TensorShard(name="rows", tensor=rows, global_shape=(NUM_RANKS, 200_000), offset=(rank, 0)),
        ],
        document={"step": step},
    )


def save_steps(directory: Path, steps: range, report: Callable[[int], None]) -> None:
    def rank_main(world: World) -> None:
        for step in steps:
            save(
                state_at(step, world.rank),
                directory=directory,
                step=step,
                comm=world,
                keep=2,
            )
            if world.rank == 0:
                report(step)

    run_threads(NUM_RANKS, rank_main, timeout_s=300)


def newest_step(directory: Path) -> int:
    """Step of the newest checkpoint, after checking every bit of it. 0 when there is none."""
    restored = load_newest_good(directory, comm=SerialWorld())
    if restored is None:
        return 0
    assert not restored.rejected, restored.rejected
    step = restored.checkpoint.step
    assert restored.checkpoint.document == {"step": step}
    assert torch.equal(restored.tensors["w"], torch.arange(400_000, dtype=torch.float32) + step)
    for rank in range(NUM_RANKS):
        assert torch.equal(restored.tensors["rows"][rank], torch.full((200_000,), float(step + rank)))
    return step


def in_child(
    action: Callable[[Callable[[int], None]], None],
    *,
    kill_after_s: float | None,
    kill_after_reports: int = 0,
) -> tuple[int, list[int]]:
    """Run `action(report)` in a fork; its wait status, and the steps that it reported before it ended.

    It is killed `kill_after_s` seconds after its `kill_after_reports`-th report (0: after its start).
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        try:
            action(lambda step: os.write(write_fd, f"{step}\n".encode()) and None)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(int(getattr(error, "exit_code", 1)))
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        lines = [pipe.readline() for _ in range(kill_after_reports)]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        reported = [int(line) for line in (*lines, *pipe) if line]
    return status, reported


def ignored(step: int) -> None:
    """A step that nobody is told of."""


def check_all(directory: Path) -> None:
    """Every file with a checkpoint's name is whole, not only the newest."""
    for path in finished_newest_first(directory):
        assert not verify(path, comm=SerialWorld())[0].damage, path


def killed_at_random(directory: Path, trials: int) -> dict[str, Any]:
    """SIGKILL at random moments of a loop of saves; the next trial goes on where the one before stopped.

    Every other child is first let finish saves, so that some kills hit a loop that is under way however slow the
    disk. More than `trials` where those have not left each kind of file.
    """
    choose = random.Random(5)
    partials, saves = 0, 0
    for number in itertools.count():
        if number >= trials and (min(partials, saves) > 0 or number >= 20 * trials):
            break
        begin = newest_step(directory) + 1
        status, reported = in_child(
            lambda report, begin=begin: save_steps(directory, range(begin, begin + 10_000), report),  # type: ignore[misc]
            kill_after_s=choose.uniform(0.02, 0.25) if number % 2 == 0 else choose.uniform(0, 0.05),
            kill_after_reports=0 if number % 2 == 0 else choose.randint(1, 3),
        )
        assert os.WIFSIGNALED(status), status
        newest_reported = max([begin - 1, *reported])
        saves += len(reported)
        partials += len(partial_files(directory))
        found = newest_step(directory)
        assert newest_reported <= found <= newest_reported + 1, (newest_reported, found)
    return {"trials": number, "saves": saves, "partials": partials, **cleaned(directory)}


def killed_at_each_operation(directory: Path, _: int) -> dict[str, Any]:
    """SIGKILL before and after the n-th write, flush, rename and removal of a save, for every n."""
    operations: list[int] = []
    outcomes = set()
    save_steps(directory, range(1, 2), ignored)
    for moment in ("before", "after"):
        for place in range(1, 10_000):
            newest = newest_step(directory)
            os.environ["CHECKPOINT_FAULT"] = f"kill-{moment}:{place}"
            status, reported = in_child(
                lambda report, step=newest + 1: save_steps(directory, range(step, step + 1), report),  # type: ignore[misc]
                kill_after_s=None,
            )
            os.environ["CHECKPOINT_FAULT"] = ""
            found = newest_step(directory)
            if not os.WIFSIGNALED(status):
                assert (status, reported, found) == (0, [newest + 1], newest + 1)
                break
            assert found in (newest, newest + 1)
            assert not reported
            outcomes.add(found - newest)
            check_all(directory)
        operations.append(place - 1)
    return {"operations": operations, "outcomes": sorted(outcomes), **cleaned(directory)}


def failing_operations(directory: Path, _: int) -> dict[str, Any]:
    """The n-th operation of a save says EIO, or ENOSPC: an error, and the older checkpoint is the newest; or it is one
    without which the save succeeds: of removing partial checkpoints, and of deleting an older checkpoint."""
    save_steps(directory, range(1, 2), ignored)
    failures, unharmed = 0, 0
    for fault in ("eio", "enospc"):
        for place in range(1, 10_000):
            newest = newest_step(directory)
            os.environ["CHECKPOINT_FAULT"] = f"{fault}:{place}"

            def failing_save(
                report: Callable[[int], None],
                step: int = newest + 1,
                place: int = place,
            ) -> None:
                try:
                    save_steps(directory, range(step, step + 1), report)
                except CheckpointError:
                    report(-1)
                if ctypes.CDLL(None).checkpoint_operations() < place:
                    report(0)

            status, reported = in_child(failing_save, kill_after_s=None)
            os.environ["CHECKPOINT_FAULT"] = ""
            assert status == 0, status
            found = newest_step(directory)
            check_all(directory)
            assert not partial_files(directory)
            if reported == [newest + 1, 0]:  # past the last one
                assert found == newest + 1
                break
            # When the flush of the directory fails, the rename has been done and the new one is there.
            assert found in (newest, newest + 1)
            assert reported in ([-1], [newest + 1])
            failures += reported == [-1]
            unharmed += reported != [-1]
    return {"failures": failures, "unharmed": unharmed, **cleaned(directory)}


def interrupted_and_short_writes(directory: Path, _: int) -> dict[str, Any]:
    """The kernel takes part of each write, or is interrupted: nobody notices."""
    found = []
    for step, fault in enumerate(("short:0", "eintr:0"), start=1):
        os.environ["CHECKPOINT_FAULT"] = fault
        status, reported = in_child(
            lambda report, step=step: save_steps(directory, range(step, step + 1), report),  # type: ignore[misc]
            kill_after_s=None,
        )
        os.environ["CHECKPOINT_FAULT"] = ""
        assert (status, reported) == (0, [step])
        found.append(newest_step(directory))
    return {"steps": found, **cleaned(directory)}


def cleaned(directory: Path) -> dict[str, Any]:
    """One more save, after which nothing but finished checkpoints is there."""
    step = newest_step(directory) + 1
    save_steps(directory, range(step, step + 1), lambda step: None)
    assert newest_step(directory) == step
    names = [path.name for path in directory.iterdir()]
    return {"left": [name for name in names if not name.startswith("step-")], "kept": len(names)}


if __name__ == "__main__":
    assert not h5py.get_config().mpi or "mpi4py.MPI" not in sys.modules
    trial = {
        "killed-at-random": killed_at_random,
        "killed-at-each-operation": killed_at_each_operation,
        "failing-operations": failing_operations,
        "interrupted-and-short-writes": interrupted_and_short_writes,
    }[sys.argv[2]]
    print(json.dumps(trial(Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)))
