"""The composition root: who am I, how do we talk, which device. A value, not module state."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final

import torch

from hpctrain.comm import (
    Monitored,
    agreed,
    all_gather_json,
    broadcast_tensors,
    make_two_level,
    open_world,
)
from hpctrain.data import Dataset, Loader
from hpctrain.errors import DataError, HpctrainError, TopologyError, UsageError
from hpctrain.launch import RankIdentity, identify
from hpctrain.reduce import AllReduceUpdater, LossScale, WireFormat
from hpctrain.reduce.collective_reducer import CollectiveReducer
from hpctrain.reduce.local_reducer import LocalReducer
from hpctrain.reduce.reducer import BucketReducer
from hpctrain.run.device import choose_device
from hpctrain.telemetry import tell
from hpctrain.topology import Mesh, Topology

T = TypeVar("T")

# Sums a buffer over all ranks, in place; collective.
Reducer = Callable[[torch.Tensor], None]


@final
class Session:
    """One run's ranks, seen from this one. Made by `start`; use it as a context manager.

    On leaving the `with` block: an error that all ranks share is told once by rank 0 and ends every rank with
    its exit code; an error that this rank alone met is told with its rank and aborts the whole job, so that no
    other rank waits for it.
    """

    def __init__(
        self,
        *,
        identity: RankIdentity,
        world: Monitored,
        topology: Topology,
        device: torch.device,
    ) -> None:
        self.identity = identity
        self.world = world
        self.mesh = Mesh(topology, world.rank)
        self.device = device
        self._hook_before: Callable[..., object] | None = None
        self.notes: list[str] = []  # what was fallen back from, and why
        self._reducers: list[
            BucketReducer
        ] = []  # in the order in which they were made, the same on all ranks

    @property
    def topology(self) -> Topology:
        return self.mesh.topology

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank_of(self.rank)

    def note(self, text: str) -> None:
        """Something the user should know: told once, by rank 0, and kept for the run's record."""
        self.notes.append(text)
        if self.rank == 0:
            tell(f"note: {text}")

    def choose_algorithm(self, asked: str) -> str:
        """`flat` or `hierarchical`: what `asked` (also `auto`) comes to on this topology. Not collective.

        Two levels need several nodes and several ranks on one of them; where they cannot run, a note says so.
        """
        if asked not in ("auto", "flat", "hierarchical"):
            raise UsageError(f"reduction algorithm {asked!r}: choose auto, flat or hierarchical")
        two_level = self.topology.num_nodes > 1 and self.num_ranks > self.topology.num_nodes
        if asked == "hierarchical" and not two_level:
            self.note(f"reduction: hierarchical was asked for, flat is used: {self.topology.describe()}")
        return "hierarchical" if two_level and asked != "flat" else "flat"

    def reducer(self, *, algorithm: str = "auto") -> Reducer:
        """A function that sums a buffer over all ranks in place, in a message space of its own. Collective."""
        if self.num_ranks == 1:
            return lambda buffer: None
        if self.choose_algorithm(algorithm) == "flat":
            return self.world.duplicate().all_reduce
        return make_two_level(self.world, self.topology).all_reduce

    def bucket_reducer(self, *, algorithm: str = "auto", wire: str = "fp32") -> BucketReducer:
        """What sums an updater's buckets. Collective. The session gives its memory back when it closes."""
        reducer = self._make_bucket_reducer(algorithm=algorithm, wire=wire)
        self._reducers.append(reducer)
        return reducer

    def _make_bucket_reducer(self, *, algorithm: str, wire: str) -> BucketReducer:
        if self.num_ranks == 1:
            return LocalReducer(wire=wire)
        comm = self.world.duplicate()
        if self.choose_algorithm(algorithm) == "flat":
            return CollectiveReducer.flat(comm, topology=self.topology, wire=wire)
        levels = make_two_level(self.world, self.topology)
        return CollectiveReducer.hierarchical(comm, levels=levels, topology=self.topology, wire=wire)

    def updater(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str = "auto",
        wire: str | WireFormat = WireFormat.FP32,
        bucket_bytes: int = 4_000_000,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
    ) -> AllReduceUpdater:
        """Wrap `optimizer`; the model's parameters and buffers become those of rank 0. Collective.

        In a plain Horovod script this is what `hvd.DistributedOptimizer` and the two broadcasts were:
        `loss.backward()`, `step()` and `zero_grad()` stay.
        """
        broadcast_tensors(self.world, [*model.parameters(), *model.buffers()], root=0)
        return AllReduceUpdater(
            optimizer, comm=self.world, bucket_bytes=bucket_bytes, loss_scale=loss_scale, clip_norm=clip_norm,
            reducer=self.bucket_reducer(algorithm=algorithm, wire=WireFormat(wire).value),
        )  # fmt: skip

    def open_dataset(self, directory: str | Path) -> Dataset:
        """Open a dataset on every rank, or raise the same DataError on all. Collective."""
        return self.agreed(lambda: Dataset.open(Path(directory)), os_error=DataError)

    def loader(self, dataset: Dataset, *, global_batch: int, seed: int = 0, **options: Any) -> Loader:
        """This rank's share of the global batches. See `hpctrain.data.Loader` for the options."""
        return Loader(
            dataset,
            global_batch=global_batch,
            rank=self.rank,
            num_ranks=self.num_ranks,
            seed=seed,
            pin_memory=self.device.type == "cuda",
            **options,
        )

    def agreed(self, function: Callable[[], T], *, os_error: type[HpctrainError]) -> T:
        """Run `function` on each rank; if it fails on any, the same error is raised on all. Collective."""
        return agreed(self.world, function, os_error=os_error)

    def mean(self, value: float) -> float:
        """Mean of a number over the ranks. Collective."""
        buffer = torch.tensor([float(value)], dtype=torch.float64)
        self.world.all_reduce(buffer)
        return float(buffer) / self.num_ranks

    def close(self) -> None:
        """Finish communication. Collective."""
        if self._hook_before is not None:
            sys.excepthook = self._hook_before
        while self._reducers:
            self._reducers.pop(0).close()
        self.world.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._fail(error)
        self.close()

    def abort_on_uncaught_error(self) -> None:
        """Outside a `with` block too, an error that nobody catches ends all ranks, not only this one."""
        if self.num_ranks > 1:
            self._hook_before = sys.excepthook
            sys.excepthook = self._uncaught

    def _uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            self._fail(error)
        except SystemExit as leave:
            # A hook cannot choose the exit code; atexit has nothing left to do once communication is closed.
            sys.stdout.flush()
            os._exit(leave.code if isinstance(leave.code, int) else 1)

    def _fail(self, error: BaseException) -> None:
        """End this rank because of `error`, and all others with it. Returns only when there are no others."""
        if self.num_ranks == 1:
            return
        if isinstance(error, HpctrainError) and error.agreed:
            if self.rank == 0:
                print(f"hpctrain: {error}", file=sys.stderr, flush=True)
            # The launcher ends all ranks when the first leaves with an error: not before rank 0 has spoken.
            self.world.barrier()
            self.close()
            raise SystemExit(int(error.exit_code)) from error
        code = _exit_code_of(error)
        text = (
            str(error)
            if isinstance(error, HpctrainError)
            else "".join(traceback.format_exception(error)).rstrip()
        )
        print(
            f"hpctrain: rank {self.rank} on {socket.gethostname()}: {text}\n"
            f"hpctrain: rank {self.rank} ends the run (exit code {code}), so that no other rank waits for it",
            file=sys.stderr,
            flush=True,
        )
        self.world.abort(code)


def start(
    *,
    backend: str = "auto",
    device: str = "auto",
    ranks: int | None = None,
    threads_per_rank: int | None = None,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> Session:
    """Join the other ranks that mpirun or srun started; alone it is a session of one rank. Collective.

    ranks: refuse to start with another number. timeout_s: a collective that takes longer ends the run with
    exit code 6; after `session.world.publish_in(shared_folder)` the message names the ranks that did not come.
    Raises LaunchError or TopologyError where launcher, environment and communication library disagree.
    """
    identity = identify(environ if environ is not None else os.environ, socket.gethostname())
    check_num_ranks(identity, ranks=ranks)
    _set_threads(threads_per_rank, identity)
    opened = open_world(backend, identity=identity)
    world = Monitored(opened.world, timeout_s=timeout_s)
    names = all_gather_json(world, [identity.node_name, identity.emulated])
    topology = Topology.from_node_names([name for name, _ in names], emulated=any(e for _, e in names))
    host, host_rank = socket.gethostname(), identity.host_rank or 0
    chosen_device, reason = choose_device(device, comm=world, host=host, host_rank=host_rank)
    session = Session(identity=identity, world=world, topology=topology, device=chosen_device)
    for note in (*opened.notes, *filter(None, [reason])):
        session.note(note)
    session.abort_on_uncaught_error()
    return session


def check_num_ranks(identity: RankIdentity, *, ranks: int | None) -> None:
    """Refuse a number of ranks that the run did not ask for."""
    if ranks is not None and identity.num_ranks != ranks:
        raise TopologyError(
            f"the recipe asks for {ranks} ranks, {identity.launcher} started {identity.num_ranks}: start it with "
            f"`hpctrain launch -n {ranks} -- ...`, mpirun -n {ranks} or srun --ntasks={ranks}, or change run.ranks"
        )


def _set_threads(asked: int | None, identity: RankIdentity) -> None:
    """As asked, else as OMP_NUM_THREADS says, else this rank's part of the cores it may run on."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // max(1, identity.host_size or 1)))


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, HpctrainError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1
