"""What the ranks do for saves and loads, and for saves in the background: how long training is blocked, peak memory,
and how much slower training steps are meanwhile."""

from __future__ import annotations

import ctypes
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, final, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpoint.peers import (
    PeerFailed,
    PeerLoading,
    PeerSaving,
    check_saved,
    disk_limit,
    named,
    peers,
    same_bits,
)
from benchmarks.memory import reset_peak, status_bytes
from benchmarks.ranks import Case, Settings
from benchmarks.reduction.methods import start_gloo
from hpctrain.bench.checkpoint.measure import take_turns
from hpctrain.bench.checkpoint.methods import (
    RAW_WRITE,
    AsyncSaving,
    BenchState,
    Copying,
    Loading,
    MethodTime,
    RawReading,
    RawShare,
    RawWriting,
    RunSaving,
    SyncSaving,
    TimedMethod,
    begin,
    make_folder,
    make_state,
    remove_and_sync,
    slowest_since,
)
from hpctrain.checkpoint import load, save
from hpctrain.checkpoint.planning.replicas import ReplicaCheck
from hpctrain.checkpoint.saving.background import BackgroundThread, HostBuffers
from hpctrain.checkpoint.saving.save import CheckpointSave, SaveOptions
from hpctrain.comm import Collective, all_gather_json
from hpctrain.comm.collectives.agreement import on_rank_0
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


# ---------------------------------------------------------------------- in the background

PAUSE_S = 0.002
# Number of consecutive steps in each round during which nothing is written.
QUIET_STEPS = 12
WIDTH, BATCH = 512, 256


@final
class DcpAsync:
    """torch DCP's `async_save`, over Gloo, which it requires. Training is blocked until it returns; then its thread
    writes."""

    name, engine, raw = "dcp async", None, RAW_WRITE

    def __init__(self, state: BenchState, *, comm: Collective, directory: Path) -> None:
        self._tensors, self._num_bytes = named(state), state.num_bytes
        self._comm, self._path = comm, directory / "dcp-async"

    def turn(self) -> MethodTime:
        begin_s = begin(self._comm)
        saving = self.begin()
        stall_s = time.perf_counter() - begin_s
        while not all(all_gather_json(self._comm, saving())):
            time.sleep(PAUSE_S)
        seconds = slowest_since(self._comm, begin_s)
        self.end()
        return MethodTime(seconds=seconds, stall_s=float(max(all_gather_json(self._comm, stall_s))))

    def begin(self) -> Callable[[], bool]:
        """Starts saving. Returns a function that says whether the save is done and raises PeerFailed if it failed."""
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(dict(self._tensors), checkpoint_id=self._path)

        def is_done() -> bool:
            if future.done() and future.exception() is not None:
                raise PeerFailed("dcp async") from future.exception()
            return bool(future.done())

        return is_done

    def end(self) -> None:
        on_rank_0(self._comm, lambda: check_saved(self._path, num_bytes=self._num_bytes))
        remove_and_sync(self._path, comm=self._comm)


def stalls(session: Session, settings: Settings) -> dict[str, Any]:
    """Returns, for hpctrain, DCP and a memcpy of each rank's share: `seconds` and `stalls` of each round, by method;
    and `share`, the bytes of each rank."""
    world, directory = session.world, Path(settings["directory"])
    state = make_state(num_bytes=settings["num_bytes"], num_tensors=settings["num_tensors"])
    raw = RawShare(state, rank=world.rank, num_ranks=world.num_ranks)
    ours = AsyncSaving(state.state, engine="auto", comm=world, directory=directory)
    methods: list[TimedMethod] = [
        Copying(raw, comm=world), ours, DcpAsync(state, comm=world, directory=directory)
    ]  # fmt: skip
    turns = take_turns(methods, repeats=settings["repeats"], warmup=settings["warmup"], seed=settings["seed"])
    ours.close()
    return {
        "seconds": {name: [turn.seconds for turn in found] for name, found in turns.items()},
        "stalls": {
            name: [turn.stall_s for turn in found] for name, found in turns.items() if found[0].stall_s
        },
        "share": all_gather_json(world, raw.num_bytes),
    }


def memory(session: Session, settings: Settings) -> dict[str, list[dict[str, int]]]:
    """Returns `ranks`: for each rank, in bytes, `idle`, the memory that holds the state; `peak`, the maximum while it
    is saved in the background; and `share`, the rank's part of the state.

    Memory is the kernel's VmHWM. A small state is saved first, because the first save loads modules and allocates
    memory that stay.
    """
    world, directory = session.world, Path(settings["directory"])
    small = make_state(num_bytes=1 << 20, num_tensors=settings["num_tensors"])
    state = make_state(num_bytes=settings["num_bytes"], num_tensors=settings["num_tensors"])
    share = RawShare(state, rank=world.rank, num_ranks=world.num_ranks).num_bytes

    def save_it(what: BenchState) -> None:
        if settings["what"] == "ours":
            ours = AsyncSaving(what.state, engine="auto", comm=world, directory=directory)
            for _ in range(settings["saves"]):
                ours.turn()
            ours.close()
        else:
            peer = DcpAsync(what, comm=world, directory=directory)
            for _ in range(settings["saves"]):
                peer.turn()

    save_it(small)
    gc.collect()
    reset_peak()
    idle = status_bytes("VmHWM")
    save_it(state)
    return {"ranks": all_gather_json(world, {"idle": idle, "peak": status_bytes("VmHWM"), "share": share})}


def steps(session: Session, settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """Returns for each method and round: seconds of the steps without a save (`quiet`), of the steps during a save
    (`beside`), and of the save.

    A step is forward and backward through a small network, the sum of the gradients over the ranks, and an update.
    The sum includes a number by which each rank reports that its part of the save is ready, as in training.
    """
    world, directory = session.world, Path(settings["directory"])
    state = make_state(num_bytes=settings["num_bytes"], num_tensors=settings["num_tensors"])
    training = _Training(world, seed=settings["seed"])
    dcp = DcpAsync(state, comm=world, directory=directory)
    buffers = HostBuffers()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in settings["limits"]}
    order = Random(settings["seed"])
    with BackgroundThread(name="hpctrain-checkpoint") as executor:

        def ours(limit: float | None) -> tuple[list[float], float]:
            options = SaveOptions(keep=None, limit_mb_per_s=limit)
            make_folder(directory / "ours", comm=world)
            begin_s = begin(world)
            saving = CheckpointSave.begin(
                state.state, directory=directory / "ours", step=1, comm=world, options=options,
                buffers=buffers, executor=executor,
            )  # fmt: skip
            during: list[float] = []
            while True:
                seconds, ready = training.step(saving.ready())
                during.append(seconds)
                if ready and saving.advance() is not None:
                    break
            seconds = slowest_since(world, begin_s)
            remove_and_sync(directory / "ours", comm=world)
            return during, seconds

        def peer() -> tuple[list[float], float]:
            begin_s = begin(world)
            is_done = dcp.begin()
            during: list[float] = []
            ready = False
            while not ready:
                seconds, ready = training.step(is_done())
                during.append(seconds)
            seconds = slowest_since(world, begin_s)
            dcp.end()
            return during, seconds

        training.quiet()
        for number in range(settings["warmup"] + settings["repeats"]):
            names = list(found)
            for name in order.sample(names, len(names)):
                quiet = training.quiet()
                asked = settings["limits"][name]
                during, seconds = peer() if name == "dcp async" else ours(asked)
                if number >= settings["warmup"]:
                    found[name].append({"quiet": quiet, "beside": during, "save": seconds})
    return found


@final
class _Training:
    """Data-parallel training of a small network, with one thread per rank."""

    def __init__(self, comm: Collective, *, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self._comm, self._model = comm, nn.Sequential(*layers)
        self._inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed + comm.rank))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._sums = torch.empty(sum(p.numel() for p in self._model.parameters()) + 1)

    def step(self, ready: bool) -> tuple[float, bool]:
        """Runs a step. Returns its seconds and whether every rank passed `ready`. Collective."""
        begin_s = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        self._model(self._inputs).square().mean().backward()
        parameters = list(self._model.parameters())
        gradients = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
        torch.cat([*gradients, torch.tensor([float(ready)])], out=self._sums)
        self._comm.all_reduce(self._sums)
        offset = 0
        for parameter in parameters:
            mine = self._sums[offset : offset + parameter.numel()].reshape(parameter.shape)
            parameter.grad = mine / self._comm.num_ranks
            offset += parameter.numel()
        self._optimizer.step()
        all_ready = int(self._sums[-1]) == self._comm.num_ranks
        return time.perf_counter() - begin_s, all_ready

    def quiet(self) -> list[float]:
        return [self.step(False)[0] for _ in range(QUIET_STEPS)]


# ---------------------------------------------------------------------- the cases


def _with_gloo(case: Case) -> Case:
    """Returns the case with torch's process group, over which DCP communicates."""

    def run(session: Session, settings: Settings) -> Any:
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # from the peers, about their own future changes
        from mpi4py import MPI

        start_gloo(MPI.COMM_WORLD)
        found = case(session, settings)
        dist.destroy_process_group()
        return found

    return run


CASES = {
    name: _with_gloo(case)
    for name, case in {
        "saves": saves, "replica_saves": replica_saves, "small_saves": small_saves, "loads": loads, "stalls": stalls,
        "memory": memory, "steps": steps,
    }.items()
}  # fmt: skip
