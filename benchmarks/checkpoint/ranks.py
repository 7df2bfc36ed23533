"""What the ranks do for saves and loads."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch.distributed as dist

from benchmarks.checkpoint import background
from benchmarks.checkpoint.limit import disk_limit
from benchmarks.checkpoint.peers import PeerLoading, PeerSaving, peers, same_bits, start_gloo
from benchmarks.ranks import Case, Settings
from hpctrain.bench.checkpoint.measure import take_turns
from hpctrain.bench.checkpoint.methods import (
    Loading,
    RawReading,
    RawWriting,
    RunSaving,
    SyncSaving,
    TimedMethod,
)
from hpctrain.bench.checkpoint.raw_io import BenchState, RawShare, make_state
from hpctrain.checkpoint import load, save
from hpctrain.checkpoint.planning.replicas import ReplicaCheck
from hpctrain.run import Session

M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def saves(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Figure 1: returns seconds of each round by method: raw writing, the disk's limit, hpctrain by engine and as in a
    run, and peers."""
    world, directory = session.world, Path(settings["directory"])
    state = _state(settings)
    raw = RawShare(state, rank=world.rank, num_ranks=world.num_ranks)
    methods: list[TimedMethod] = [
        RawWriting(raw, comm=world, directory=directory),
        *disk_limit(raw, comm=world, directory=directory),
        *(
            SyncSaving(state.state, engine=engine, comm=world, directory=directory)
            for engine in settings["engines"]
        ),
        RunSaving(state.state, engine="auto", comm=world, directory=directory),
        *(
            PeerSaving(peer, state, comm=world, directory=directory)
            for peer in peers(world, names=settings["peers"])
        ),
    ]
    return _seconds(methods, settings)


def replica_saves(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Figure 4: returns seconds of each round, of saves as in a run, by method of comparing replicas."""
    world, directory = session.world, Path(settings["directory"])
    state = _state(settings)
    methods = [
        RunSaving(state.state, engine="auto", comm=world, directory=directory, replica_check=how)
        for how in get_args(ReplicaCheck)
    ]
    return _seconds(methods, settings)


def small_saves(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Figure 1: returns seconds of each round for the same bytes in many and in few tensors, of hpctrain and peers."""
    world, methods = session.world, []
    for label, num_tensors in settings["tensors"].items():
        directory = Path(settings["directory"]) / label
        if world.rank == 0:
            directory.mkdir()
        world.barrier()
        state = make_state(num_bytes=settings["num_bytes"], num_tensors=num_tensors)
        both: list[Any] = [SyncSaving(state.state, engine="auto", comm=world, directory=directory)]
        both += [
            PeerSaving(peer, state, comm=world, directory=directory)
            for peer in peers(world, names=settings["peers"])
        ]
        for method in both:
            method.name = f"{method.name}, {label}"
        methods += both
    return _seconds(methods, settings)


def loads(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Figure 2: returns seconds of each round by method: raw reading, hpctrain, peers."""
    # Every method gets large allocations newly from the kernel, as in a process that has just started.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    _touch_memory(num_bytes=settings["touched_bytes"])
    world, directory = session.world, Path(settings["directory"])
    state, cold = _state(settings), settings["cold"]
    raw = RawShare(state, rank=world.rank, num_ranks=world.num_ranks)
    _check_load(session, state, directory=directory / "checked")
    methods: list[TimedMethod] = [
        RawReading(raw, comm=world, directory=directory, cold=cold),
        Loading(state.state, comm=world, directory=directory, cold=cold),
        *(
            PeerLoading(peer, state, comm=world, directory=directory, cold=cold)
            for peer in peers(world, names=settings["peers"])
        ),
    ]
    return _seconds(methods, settings)


def _touch_memory(*, num_bytes: int) -> None:
    """Writes to `num_bytes` of memory once. On a virtual machine the host provides a page at its first use, which takes
    ten times as long as reading it, and would be counted in the time of the first method that allocates it."""
    memory = np.empty(num_bytes, dtype=np.uint8)
    memory.fill(1)


def _check_load(session: Session, state: BenchState, *, directory: Path) -> None:
    """Saves and loads once. Raises RuntimeError if the loaded tensors differ from the saved ones."""
    done = save(state.state, directory=directory, step=1, comm=session.world)
    _, loaded = load(done.path, comm=session.world)
    if any(not same_bits(loaded[item.name], item.tensor) for item in state.state.items):
        raise RuntimeError("the loaded tensors differ from the saved ones")
    session.world.barrier()
    if session.rank == 0:
        done.path.unlink()


def _state(settings: Settings) -> BenchState:
    return make_state(num_bytes=settings["num_bytes"], num_tensors=settings["num_tensors"])


def _seconds(methods: Sequence[TimedMethod], settings: Settings) -> dict[str, list[float]]:
    turns = take_turns(methods, repeats=settings["repeats"], warmup=settings["warmup"], seed=settings["seed"])
    return {name: [turn.seconds for turn in found] for name, found in turns.items()}


def _with_gloo(case: Case) -> Case:
    """Returns the case with torch's process group, over which DCP communicates."""

    def run(session: Session, settings: Settings) -> Any:
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # from the peers, about their own future changes
        start_gloo(session.world, directory=Path(settings["meeting"]))
        found = case(session, settings)
        dist.destroy_process_group()
        return found

    return run


CASES = {
    name: _with_gloo(case)
    for name, case in {
        "saves": saves, "replica_saves": replica_saves, "small_saves": small_saves, "loads": loads, **background.CASES,
    }.items()
}  # fmt: skip
