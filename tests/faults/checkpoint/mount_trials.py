"""Saves on a filesystem that several nodes have mounted and that fails: killed ranks, dead mounts, errors.

Run as `python -m tests.faults.checkpoint.mount_trials DIRECTORY '{"NAME": COUNT, ...}'`; prints one line of JSON.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import load_newest_good
from hpctrain.comm.collectives.agreement import all_gather_json
from hpctrain.errors import CheckpointError, ExitCode
from tests.faults.checkpoint.mount_trial import LIMIT_S, Trial
from tests.faults.checkpoint.mounts import Nodes, own_mounts
from tests.faults.checkpoint.power_trials import power_loss
from tests.faults.checkpoint.process_ranks import Ended
from tests.faults.checkpoint.saves import (
    NUM_RANKS,
    WAYS,
    Way,
    left_over,
    newest_step,
    save_step,
    saver,
    spread,
)


def killed_at_random(trial: Trial, count: int) -> dict[str, Any]:
    """SIGKILL of one rank, of all, of one node's mount, of all mounts, at random moments of a loop of saves."""
    choose = random.Random(8)
    kinds = ("rank 0", "rank 1", "all ranks", "mount 0", "mount 1", "all mounts")
    found, half_way, slowest_s = 0, 0, 0.0
    for number in range(count):
        trial.nodes.mend()
        kind, way = kinds[number % len(kinds)], WAYS[number // len(kinds) % len(WAYS)]
        save = saver(
            directory=trial.place, steps=range(found + 1, found + 10_000), way=way, reports=trial.reports
        )
        begun_read, begun_write = os.pipe()

        def rank_main(world: Any, save: Callable[[Any], None] = save, begun: int = begun_write) -> None:
            import h5py  # noqa: F401 - else by the first save of each of these forks: it takes longer than the save

            os.write(begun, b"b")
            save(world)

        ranks = trial.nodes.start_ranks(rank_main, num_ranks=NUM_RANKS)
        for _ in range(NUM_RANKS):
            os.read(begun_read, 1)
        os.close(begun_read)
        os.close(begun_write)
        time.sleep(choose.uniform(0, 0.3))
        begin_s = time.monotonic()
        chosen = range(NUM_RANKS) if "all" in kind else [int(kind[-1])]
        for place in chosen:
            if "rank" in kind:
                ranks.kill([place])
            else:
                trial.nodes.mounts[place].kill()
        ended = ranks.wait(timeout_s=300)
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        assert_ended(ended, killed=list(chosen) if "rank" in kind else [])
        half_way += bool(left_over(trial.stored))
        found = trial.check(before=found)
    assert slowest_s < LIMIT_S, slowest_s
    return {"trials": count, "half_way": half_way, "newest": found, **trial.cleaned()}


def assert_ended(ended: list[Ended], *, killed: list[int]) -> None:
    """Killed ranks were killed; without any, all say that the checkpoint failed; else the others that a rank
    is gone."""
    for rank, each in enumerate(ended):
        if rank in killed:
            assert each.code == -9, ended
        elif killed:
            assert each.code not in (0, 1, -9), ended
        else:
            assert each.code == ExitCode.CHECKPOINT, ended


def killed_at_each_operation(trial: Trial, count: int) -> dict[str, Any]:
    """All ranks killed, or the mount of a node, before or after its n-th operation of a save; `count` of all."""
    trial.save(1, way=WAYS[0])
    found, outcomes = 1, Counter[str]()
    cases: list[tuple[Way, int, int, str]] = []
    for way, node in itertools.product(WAYS, range(NUM_RANKS)):
        operations = operations_of_a_save(trial, step=found + 1, node=node, way=way)
        found += 1
        # The last operations are the commit: they come first here, and so are among the few of a short run.
        for place, kind in itertools.product(
            range(len(operations), 0, -1), ("kill-before", "die-after", "die-before", "kill-after")
        ):
            cases.append((way, node, place, kind))
    for number in spread(len(cases), count=count):
        way, node, place, kind = cases[number - 1]
        trial.nodes.mend()
        found_before = found
        go_read, go_write = os.pipe()

        def save_on_signal(world: Any, step: int = found + 1, way: Way = way, go: int = go_read) -> None:
            os.read(go, 1)
            save_step(step, directory=trial.place, comm=world, way=way)
            if world.rank == 0:
                trial.reports.add(step)

        ranks = trial.nodes.start_ranks(save_on_signal, num_ranks=NUM_RANKS)
        trial.nodes.mounts[node].fault(kind, at=place, victims=ranks.pids)
        os.write(go_write, b"g" * NUM_RANKS)
        begin_s = time.monotonic()
        ended = ranks.wait(timeout_s=300)
        assert time.monotonic() - begin_s < LIMIT_S
        os.close(go_read)
        os.close(go_write)
        found = trial.check(before=found)
        outcomes[f"{kind} {found - found_before}"] += 1
        if kind.startswith("kill"):
            assert -9 in [each.code for each in ended], (way, node, place, kind, ended)
    return {"tried": sum(outcomes.values()), "outcomes": dict(outcomes), **trial.cleaned()}


def operations_of_a_save(trial: Trial, *, step: int, node: int, way: Way) -> list[str]:
    trial.nodes.mounts[node].fault()
    trial.save(step, way=way)
    return trial.nodes.mounts[node].operations()


def failing_operations(trial: Trial, count: int) -> dict[str, Any]:
    """The n-th operation of a node fails, once or from then on: an error on all ranks, and the older
    checkpoint is as it was. All in one launch of ranks: they have to be fit for the next save."""
    trial.save(1, way=WAYS[0])
    faults: list[tuple[Way, int, dict[str, Any]]] = []
    newest = 1
    for way, node in itertools.product(WAYS, range(NUM_RANKS)):
        newest += 1
        operations = operations_of_a_save(trial, step=newest, node=node, way=way)
        for place in spread(len(operations), count=count):
            for number, sticky in ((errno.EIO, False), (errno.ENOSPC, True), (errno.ESTALE, True)):
                fault = {"kind": "error", "errno": number, "sticky": sticky, "at": place}
                faults.append((way, node, fault))
    ranks = trial.nodes.start_ranks(
        lambda world: meet_faults(world, trial, faults, newest=newest), num_ranks=NUM_RANKS
    )
    ended = ranks.wait(timeout_s=400)
    assert [each.code for each in ended] == [0] * NUM_RANKS, ended
    assert ended[0].value == ended[1].value
    return {**ended[0].value, **trial.cleaned()}


def meet_faults(
    world: Any, trial: Trial, faults: list[tuple[Way, int, dict[str, Any]]], *, newest: int
) -> dict[str, Any]:
    """What every rank does of `failing_operations`: the same faults in the same order. Collective."""
    errors, slowest_s = 0, 0.0
    for way, node, fault in faults:
        step = newest + 1
        on_rank_0(world, lambda node=node, fault=fault: trial.nodes.mounts[node].fault(**fault))
        begin_s = time.monotonic()
        text = ""
        try:
            save_step(step, directory=trial.place, comm=world, way=way)
        except CheckpointError as error:
            text = f"{error} (agreed: {error.agreed})"
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        on_rank_0(world, lambda node=node: trial.nodes.mounts[node].fault())
        assert set(all_gather_json(world, text)) == {text}
        assert not text or text.endswith("(agreed: True)")
        found = max(all_gather_json(world, newest_step(trial.stored) if world.rank == 0 else 0))
        # When only the flush of the directory failed, the rename has been done and the new one is there.
        assert found in ((newest, step) if text else (step,)), (way, node, fault, text, found)
        errors += bool(text)
        newest = found
    assert slowest_s < LIMIT_S
    return {"faults": len(faults), "errors": errors}


def on_rank_0(world: Any, action: Callable[[], None]) -> None:
    if world.rank == 0:
        action()
    world.barrier()


def vanishing_directory(trial: Trial, count: int) -> dict[str, Any]:
    """The checkpoint directory is moved away at the n-th operation, as by a person or a failed mount; when it
    is back, the older checkpoint is as it was."""
    trial.save(1, way=WAYS[0])
    found, errors = 1, 0
    away = trial.stored.with_name("checkpoints.away")
    for way in WAYS:
        operations = operations_of_a_save(trial, step=found + 1, node=0, way=way)
        found += 1
        for place in spread(len(operations), count=count):
            trial.nodes.mounts[0].fault("vanish", at=place, directory="checkpoints")
            errors += trial.try_to_save(found + 1, way=way, timeout_s=LIMIT_S) != 0
            trial.nodes.mounts[0].fault()
            if away.exists():
                assert not trial.stored.exists(), "a new directory was made in the place of the lost one"
                away.rename(trial.stored)
            found = trial.check(before=found)
    return {"errors": errors, **trial.cleaned()}


def failing_reads(trial: Trial, count: int) -> dict[str, Any]:
    """A node cannot read the newest checkpoint from the n-th read on: all ranks load the older one. Its mount dies: an
    error on all ranks."""
    outcomes = Counter[str]()
    step = 1
    for way in (WAYS[0], WAYS[2]):
        for _ in range(2):
            trial.save(step, way=way)
            step += 1
        newest = step - 1

        def load_newest(world: Any) -> int:
            restored = load_newest_good(trial.place, comm=world)
            assert restored is not None
            return restored.checkpoint.step

        for node in range(NUM_RANKS):
            name = f"step-{newest:08d}"
            trial.nodes.mounts[node].fault(reads=name)
            ended = trial.nodes.start_ranks(load_newest, num_ranks=NUM_RANKS).wait()
            assert [each.value for each in ended] == [newest] * NUM_RANKS, ended
            reads = trial.nodes.mounts[node].operations().count("read")
            assert reads > 0
            for place, kind in itertools.product(spread(reads, count=count), ("error", "die-before")):
                trial.nodes.mounts[node].fault(kind, at=place, errno=errno.EIO, sticky=True, reads=name)
                ranks = trial.nodes.start_ranks(load_newest, num_ranks=NUM_RANKS)
                ended = ranks.wait(timeout_s=LIMIT_S)
                assert len({(each.code, str(each.value)) for each in ended}) == 1, (way, node, kind, ended)
                if kind == "error":
                    assert ended[0].value == newest - 1, ended
                    outcomes["fell back"] += 1
                else:
                    assert ended[0].code == ExitCode.CHECKPOINT, ended
                    outcomes["mount died"] += 1
                trial.nodes.mend()
            trial.nodes.mounts[node].fault()
    return {"outcomes": dict(outcomes), **trial.cleaned()}


def short_writes(trial: Trial, count: int) -> dict[str, Any]:
    """The filesystem takes a part of every write: nobody notices. Of one past the page cache the kernel may make an
    error, with FUSE: then all ranks say so, and the older checkpoint is as it was."""
    saved, errors = 0, 0
    for way in WAYS:
        for mount in trial.nodes.mounts:
            mount.fault("short", at=0)
        failed = trial.try_to_save(saved + 1, way=way) != 0
        assert way.page_cache == "bypass" or not failed
        saved, errors = saved + (not failed), errors + failed
        assert trial.newest() == saved
        assert failed or min(len(mount.operations()) for mount in trial.nodes.mounts) > 10
    for mount in trial.nodes.mounts:
        mount.fault()
    return {"saved": saved, "errors": errors, **trial.cleaned()}


TRIALS = {
    "power-loss": power_loss,
    "killed-at-random": killed_at_random,
    "killed-at-each-operation": killed_at_each_operation,
    "failing-operations": failing_operations,
    "vanishing-directory": vanishing_directory,
    "failing-reads": failing_reads,
    "short-writes": short_writes,
}


def main(directory: Path, counts: dict[str, int]) -> dict[str, Any]:
    """Result of each trial by its name; a traceback where it failed."""
    own_mounts()
    results: dict[str, Any] = {}
    for name, count in counts.items():
        place = directory / name
        place.mkdir()
        try:
            with Nodes(place, num_nodes=NUM_RANKS) as nodes:
                results[name] = TRIALS[name](Trial(nodes, place), count)
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
