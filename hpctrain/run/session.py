"""The composition root: who am I, how do we talk, which device. A value, not module state."""

from __future__ import annotations

import math
import os
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final, overload

import torch

from hpctrain.comm import (
    Monitored,
    agreed,
    all_gather_json,
    broadcast_tensors,
    make_two_level,
    open_world,
)
from hpctrain.comm.backends.horovod_environment import (
    NCCL_VARIABLES,
    HorovodBuild,
    nccl_in_effect,
    why_no_nccl,
)
from hpctrain.comm.collectives.reduce_values import Operation, all_reduce_values
from hpctrain.data import Dataset, Loader, Samples
from hpctrain.errors import DataError, HpctrainError, TopologyError, UsageError
from hpctrain.launch import RankIdentity, identify
from hpctrain.launch.cores import RankCores, core_share, cpu_share, read_cores
from hpctrain.launch.yielding import describe_crowd, may_starve
from hpctrain.reduce import AllReduceUpdater, LossScale
from hpctrain.reduce.algorithms import AUTO, TWO_LEVELS, Algorithm, Means, decide, parse_algorithm
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.run.device import choose_device
from hpctrain.run.reduction import Reduction, ReductionPlan, gradient_bytes, make_reduction
from hpctrain.telemetry import tell
from hpctrain.topology import Mesh, Topology
from hpctrain.train.sync_batch_norm import communicates_in_forward, convert_sync_batch_norm

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
        horovod: HorovodBuild | None = None,
        backend_reason: str = "",
    ) -> None:
        """backend_reason: why communication goes over this backend, for the run's record."""
        self.identity = identity
        self.backend_reason = backend_reason
        self.world = world
        self.mesh = Mesh(topology, world.rank)
        self.device = device
        self._horovod = horovod
        self._hook_before: Callable[..., object] | None = None
        self.notes: list[str] = []  # what was fallen back from, and why
        self._reducers: list[
            BucketReducer
        ] = []  # in the order in which they were made, the same on all ranks
        self._closers: list[Callable[[], object]] = []
        self._updaters: weakref.WeakSet[AllReduceUpdater] = weakref.WeakSet()

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

    def reducer(self, *, algorithm: str = AUTO) -> Reducer:
        """A function that sums any buffer over all ranks in place, in a message space of its own. Collective.

        By the backend's own operations, so it can be called with any size: `flat`, or `hierarchical-flat`, which is
        `auto` too where there are two levels. With the backend `horovod`, Horovod runs from here on until the session
        is closed.
        """
        asked = Algorithm.HIERARCHICAL_FLAT if algorithm == AUTO else parse_algorithm(algorithm)
        means = Means(backend=self.world.reduction_backend, topology=self.topology, messages=False)
        two_levels = decide(Algorithm.HIERARCHICAL_FLAT, wire="fp32", means=means).note is None
        runs = Algorithm.HIERARCHICAL_FLAT if two_levels and asked in TWO_LEVELS else Algorithm.FLAT
        if algorithm != AUTO and runs is not asked:
            why = "a buffer of any size goes by the backend's operations"
            if asked in TWO_LEVELS and not two_levels:
                why = self.topology.describe()
            self.note(f"reduction: {asked.value} was asked for, {runs.value} is used: {why}")
        if self.num_ranks == 1:
            return lambda buffer: None
        world = self.world.open_reduction_world()
        self.on_close(world.close)
        return world.all_reduce if runs is Algorithm.FLAT else make_two_level(world, self.topology).all_reduce

    def reduction(self, plan: ReductionPlan, *, gradient_bytes: int) -> Reduction:
        """What sums an updater's buckets. Collective. The session gives its memory back when it closes."""
        made = make_reduction(
            self.world, plan, topology=self.topology, device=self.device, gradient_bytes=gradient_bytes,
            overlap=self.overlap(), nccl=self.nccl(plan.algorithm), note=self.note,
        )  # fmt: skip
        self._reducers.append(made.reducer)
        return made

    def overlap(self) -> bool:
        """Whether reductions gain by running beside backward. Collective.

        They wait for a network or a device, or have a core to run on. On one node whose ranks use every core they
        would only take turns with backward, at the price of the turns.
        """
        everyone = [RankCores.from_json(c) for c in all_gather_json(self.world, read_cores().to_json())]
        share = cpu_share(everyone, self.rank)
        spare = all(all_gather_json(self.world, share >= torch.get_num_threads() + 1))
        return spare or self.topology.num_nodes > 1 or self.device.type != "cpu"

    def nccl(self, asked: str) -> Algorithm | None:
        """Which of Horovod's own two-level sums runs in this process; told where it is not the one asked for."""
        device_type = self.device.type
        found = nccl_in_effect(self._horovod, topology=self.topology, device_type=device_type)
        if asked in NCCL_VARIABLES:
            why = why_no_nccl(asked, build=self._horovod, topology=self.topology, device_type=device_type)
            if why is not None:
                self.note(f"reduction: {asked}: {why}")
        elif found is not None:
            self.note(f"reduction: Horovod's all-reduce runs {found}, as {NCCL_VARIABLES[found]} asks")
        return Algorithm(found) if found is not None else None

    def bucket_reducer(
        self, *, algorithm: str = AUTO, wire: str = "fp32", gradient_bytes: int = 0
    ) -> BucketReducer:
        """The reducer of `reduction`, by the names in the recipe. Collective."""
        plan = ReductionPlan(algorithm=algorithm, wire=wire)
        return self.reduction(plan, gradient_bytes=gradient_bytes).reducer

    def updater(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str = AUTO,
        wire: str = "fp32",
        bucket_bytes: int | None = None,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        reduction: Reduction | None = None,
    ) -> AllReduceUpdater:
        """Wrap `optimizer`; the model's parameters and buffers become those of rank 0. Collective.

        In a plain Horovod script this is what `hvd.DistributedOptimizer` and the two broadcasts were:
        `loss.backward()`, `step()` and `zero_grad()` stay. reduction: made before, by `reduction`; then
        algorithm, wire and bucket_bytes are its own. BufferMismatch on every rank, naming those that differ, where one
        has another model or trains another part of it.
        """
        broadcast_tensors(self.world, [*model.parameters(), *model.buffers()], root=0, name="the model")
        if reduction is None:
            plan = ReductionPlan(algorithm=algorithm, wire=wire, bucket_bytes=bucket_bytes)
            reduction = self.reduction(plan, gradient_bytes=gradient_bytes(model))
        updater = AllReduceUpdater(
            optimizer, comm=self.world, reducer=reduction.reducer, bucket_bytes=reduction.bucket_bytes,
            loss_scale=loss_scale, clip_norm=clip_norm, overlap=reduction.overlap,
        )  # fmt: skip
        self._updaters.add(updater)
        return updater

    def open_dataset(self, directory: str | Path, **options: Any) -> Dataset:
        """Open a dataset on every rank, or raise the same DataError on all. Collective.

        options: of `hpctrain.data.Dataset.open`.
        """
        return self.agreed(lambda: Dataset.open(Path(directory), **options), os_error=DataError)

    def on_close(self, close: Callable[[], object]) -> None:
        """Call `close` when the session is closed, before communication ends. It may be collective."""
        self._closers.append(close)

    def loader(self, dataset: Samples, *, global_batch: int, seed: int = 0, **options: Any) -> Loader:
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

    @overload
    def all_reduce(self, value: torch.Tensor, *, op: Operation = "sum") -> torch.Tensor: ...
    @overload
    def all_reduce(self, value: Mapping[str, float], *, op: Operation = "sum") -> dict[str, float]: ...
    def all_reduce(
        self, value: torch.Tensor | Mapping[str, float], *, op: Operation = "sum"
    ) -> torch.Tensor | dict[str, float]:
        """Sum, mean or max of a tensor, or of numbers by name, over the ranks. Collective. See `all_reduce_values`."""
        return all_reduce_values(self.world, value, op=op)

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` with its batch normalisation over all ranks' samples. Collective; see `convert_sync_batch_norm`."""
        if self.num_ranks == 1:
            return model
        comm = self.world.duplicate()
        model = self.agreed(lambda: convert_sync_batch_norm(model, comm), os_error=UsageError)
        if not communicates_in_forward(model):
            self.note("batch normalisation over the ranks was asked for, the model has none")
        return model

    def close(self) -> None:
        """Finish communication. Collective."""
        if self._hook_before is not None:
            sys.excepthook = self._hook_before
        # Their threads first: they use the reducers' memory.
        ended = [updater.close() for updater in list(self._updaters)]
        if all(all_gather_json(self.world, all(ended))):
            while self._reducers:
                self._reducers.pop(0).close()
        while self._closers:
            self._closers.pop()()
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
    algorithm: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Session:
    """Join the other ranks that mpirun or srun started; alone it is a session of one rank. Collective.

    ranks: refuse to start with another number. algorithm: of the reduction, which Horovod must know when it starts
    (nccl-hierarchical, nccl-torus). timeout_s: a collective that takes longer ends the run with exit code 6, and all
    ranks have ended by then (see `Monitored`); after `session.world.publish_in(shared_folder)`, which is collective,
    the message names the ranks that did not come.
    Raises LaunchError or TopologyError where launcher, environment and communication library disagree.
    """
    identity = identify(environ if environ is not None else os.environ, socket.gethostname())
    check_num_ranks(identity, ranks=ranks)
    opened = open_world(backend, identity=identity, algorithm=algorithm, device=device)
    world = Monitored(opened.world, timeout_s=timeout_s)
    mine = [identity.node_name, identity.emulated, read_cores().to_json(), may_starve()]
    everyone = all_gather_json(world, mine)
    cores = [RankCores.from_json(entry[2]) for entry in everyone]
    _set_threads(threads_per_rank, core_share(cores, world.rank))
    topology = Topology.from_node_names(
        [entry[0] for entry in everyone], emulated=any(entry[1] for entry in everyone)
    )
    host, host_rank = socket.gethostname(), identity.host_rank or 0
    chosen_device, reason = choose_device(device, comm=world, host=host, host_rank=host_rank)
    session = Session(
        identity=identity, world=world, topology=topology, device=chosen_device, horovod=opened.horovod,
        backend_reason=opened.reason,
    )  # fmt: skip
    crowd = describe_crowd(cores, may_starve=[entry[3] for entry in everyone])
    for note in (*opened.notes, *filter(None, [reason, crowd])):
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


def _set_threads(asked: int | None, share: Fraction) -> None:
    """As asked, else as OMP_NUM_THREADS says, else this rank's share of the cores it may run on."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, math.floor(share)))


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, HpctrainError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1
