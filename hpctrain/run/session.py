"""The session of a run: its ranks, communication, topology and device. An object, without module state."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final, overload

import torch

from hpctrain.checkpoint import SaveOptions
from hpctrain.comm import (
    HorovodBuild,
    Monitored,
    Operation,
    agreed,
    all_gather_distinct,
    all_reduce_values,
    broadcast_tensors,
    is_true_everywhere,
    open_world,
    starting,
)
from hpctrain.data import Batch, Dataset, Loader, Samples, open_together
from hpctrain.distributed import (
    ParallelPlan,
    broadcast_model,
    end_process_group,
    is_sharded,
    parallelize,
    pipeline_of,
    shard_of,
    split_of,
)
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch import (
    RankCores,
    RankIdentity,
    core_share,
    describe_crowd,
    identify,
    may_starve,
    read_cores,
)
from hpctrain.public_names import warn_of_old_name
from hpctrain.reduce import (
    AUTO,
    CompareRanks,
    LossScale,
    ShardedUpdater,
    StepWatch,
    reduce_gradients_by,
    watch_steps,
)
from hpctrain.resilience import give_back_large_pieces, keep_freed_memory
from hpctrain.run.compute.device import choose_device
from hpctrain.run.compute.postponed_dynamo import postpone_dynamo
from hpctrain.run.compute.ranks import RankAxes, check_num_ranks, set_threads
from hpctrain.run.compute.uncaught_errors import UncaughtErrors, uncaught_as_message
from hpctrain.run.experiments.causes.findings import CheckReport
from hpctrain.run.experiments.own_loop import Build, check_loop
from hpctrain.run.reduction import Reduction, ReductionPlan, check_for_layouts, gradient_bytes, layouts_of
from hpctrain.run.reductions import Reductions
from hpctrain.storage import release_all
from hpctrain.telemetry import tell
from hpctrain.topology import Mesh, Topology
from hpctrain.train import (
    FiniteCheck,
    Position,
    SessionUpdater,
    Stateful,
    Trainings,
    agreed_batches,
    communicates_in_forward,
    convert_sync_batch_norm,
)

T = TypeVar("T")


@final
class Session:
    """This rank's access to the run's other ranks. Made by `init`; use it as a context manager.

    When the `with` block raises an error that all ranks share, rank 0 prints it once and every rank exits with its
    exit code. An error of this rank only is printed with its rank and aborts the whole job, so that no other rank
    waits for this one.
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
        cores: Sequence[RankCores] | None = None,
    ) -> None:
        """backend_reason: why communication goes over this backend, for the run's record. cores: of all ranks."""
        self.identity = identity
        self.backend_reason = backend_reason
        self.world = world
        self.mesh = Mesh(topology, world.rank)
        self.device = device
        self.uncaught_errors = UncaughtErrors(world, close=self.close)
        self.notes: list[str] = []  # fallbacks and their reasons
        self._cores = cores
        self.reductions = Reductions(
            world, topology=topology, device=device, horovod=horovod, note=self.note, cores=self.gather_cores
        )
        self.axes = RankAxes(topology, rank=world.rank)
        self._finite = FiniteCheck(comm=world, say=self.note)
        self._closers: list[Callable[[], object]] = []
        self.trainings = Trainings(world, drawing=lambda: self.axes.drawing, note=self.note)
        self._watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()

    def gather_cores(self) -> Sequence[RankCores]:
        """Returns the cores of all ranks, by rank. Collective at the first call, unless `init` has gathered them."""
        if self._cores is None:
            found, number_of_rank = all_gather_distinct(self.world, read_cores().to_json())
            different = [RankCores.from_json(value) for value in found]
            self._cores = [different[number] for number in number_of_rank]
        return self._cores

    @property
    def topology(self) -> Topology:
        return self.mesh.topology

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to `world_size` - 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.world.num_ranks

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its node, from 0."""
        return self.topology.local_rank_of(self.rank)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this rank's node."""
        return len(self.topology.ranks_by_node[self.topology.node_of(self.rank)])

    @property
    def num_ranks(self) -> int:
        """Deprecated name of `world_size`."""
        warn_of_old_name("session.num_ranks", use="session.world_size")
        return self.world_size

    def note(self, text: str) -> None:
        """Adds a note for the user: printed once, by rank 0, and kept for the run's record."""
        self.notes.append(text)
        if self.rank == 0:
            tell(f"note: {text}")

    def distributed_optimizer(
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
        compare_ranks: CompareRanks = "error",
    ) -> SessionUpdater:
        """Wraps `optimizer`, and copies rank 0's parameters and buffers to all ranks. Collective.

        Replaces `hvd.DistributedOptimizer` and the two broadcasts of a plain Horovod script: `loss.backward()`,
        `step()` and `zero_grad()` are used as before.

        Args:
            model: The model, whole or split by `parallelize`. If it is split by `shard = "optimizer"` or
                `"gradients"`, a `ScatterUpdater` is returned on more than one rank; with sharded parameters, split
                layers or a pipeline a `ShardedUpdater`.
            optimizer: Its parameters that are not in the model are copied and saved too, unless the model is split.
            algorithm: How gradients are summed; "auto" measures. For sharded parameters as in
                `reduce_gradients_by`; ignored with split layers or a pipeline.
            wire: The format in which gradients are sent. Ignored where `algorithm` is.
            bucket_bytes: Bytes of gradients per message; None: chosen. Ignored for a `ShardedUpdater`.
            loss_scale: For float16; None: no scale.
            clip_norm: Largest norm of the mean gradient; None: no limit.
            reduction: One that `reductions.make` has returned, instead of algorithm, wire and bucket_bytes. Ignored
                for a `ShardedUpdater`.
            compare_ranks: What `step` does when parameters or settings of the optimizer have come to differ between
                ranks: "error" raises RanksDiffer, "note" says so once, "off" does not compare.

        Raises BufferMismatch on every rank, with the ranks that differ, if one has another model or trains another
        part of it; UsageError on every rank for a model or optimizer whose state no checkpoint could hold, or that
        cannot be stepped.
        """
        shard, pipeline = shard_of(model), pipeline_of(model)
        training = self.agreed(lambda: self.trainings.parts_for(model, optimizer), os_error=UsageError)
        layouts = layouts_of(model, num_ranks=self.world_size)
        self.agreed(lambda: check_for_layouts(optimizer, layouts, model=model), os_error=UsageError)
        if is_sharded(model) or pipeline is not None:
            end_sums: Callable[[], object] | None = None
            if shard == "parameters" and split_of(model) is None and pipeline is None:
                end_sums = reduce_gradients_by(
                    algorithm,
                    wire=wire,
                    model=model,
                    world=self.world,
                    topology=self.topology,
                    note=self.note,
                )
            sharded = ShardedUpdater(
                model,
                optimizer,
                comm=self.world,
                loss_scale=loss_scale,
                clip_norm=clip_norm,
                end_sums=end_sums,
            )
            self.trainings.add(sharded, training)
            return self._watched(sharded, model, compare_ranks)
        broadcast_model(self.world, model)
        broadcast_tensors(self.world, list(training.outside.values()), name="parameters outside the model")
        if reduction is None:
            plan = ReductionPlan(algorithm=algorithm, wire=wire, bucket_bytes=bucket_bytes)
            reduction = self.reductions.make(plan, gradient_bytes=gradient_bytes(model), shard=shard)
        updater = reduction.updater(
            optimizer, comm=self.world, model=model, loss_scale=loss_scale, clip_norm=clip_norm
        )
        self.trainings.add(updater, training)
        return self._watched(updater, model, compare_ranks)

    def updater(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> SessionUpdater:
        """Deprecated name of `distributed_optimizer`."""
        warn_of_old_name("session.updater", use="session.distributed_optimizer")
        return self.distributed_optimizer(model, optimizer, **options)

    def _watched(
        self, updater: SessionUpdater, model: torch.nn.Module, compare_ranks: CompareRanks
    ) -> SessionUpdater:
        return watch_steps(
            updater,
            model,
            comm=self.world,
            compare_ranks=compare_ranks,
            say=self.note,
            together=self._watches,
        )

    def parallelize(self, model: torch.nn.Module, plan: ParallelPlan) -> torch.nn.Module:
        """Splits `model` as `plan` says, in place, and returns it. Collective; see `hpctrain.distributed`."""
        timeout_s = self.world.limits.settings.timeout_s
        if plan.tensor > 1:
            self.agreed(lambda: self.axes.arrange(tensor=plan.tensor), os_error=UsageError)
        if plan.shard == "parameters":
            give_back_large_pieces()
        if parallelize(
            model, plan, world=self.world, topology=self.topology, device=self.device, timeout_s=timeout_s
        ):
            self.on_close(end_process_group)
        if plan.shard == "parameters":
            give_back_large_pieces()  # what the whole model had
        return model

    def save_state(
        self,
        directory: str | Path,
        updater: SessionUpdater,
        position: Position,
        *,
        loader: Loader | None = None,
        options: SaveOptions | None = None,
        also: Mapping[str, Stateful | None] | None = None,
    ) -> Path:
        """Saves model, optimizer, updater, random generators and `position`; returns the checkpoint's path. Collective.

        Args:
            directory: The folder of the checkpoints, shared by all nodes; this one is named by `position.step`.
            updater: What `distributed_optimizer` of this session has returned.
            position: Where training continues after a load.
            loader: The loader to whose dataset, order and seed `position` belongs; `load_state` compares them.
            options: How to save, and which older checkpoints to keep; by default the last three.
            also: Other objects with `state_dict` and `load_state_dict` by name, such as schedulers. They are saved in
                the same checkpoint, and must have the same state on every rank. None: no object.

        Raises CheckpointError on every rank, and the older checkpoints stay, if the state cannot be written or an
        object's differs between ranks.
        """
        self._finite.before_save(self.trainings.model_of(updater), step=position.step)
        return self.trainings.save(
            directory, updater, position, loader=loader, options=options, also=also or {}
        )

    def load_state(
        self,
        source: str | Path,
        updater: SessionUpdater,
        *,
        loader: Loader | None = None,
        also: Mapping[str, Stateful | None] | None = None,
    ) -> Position:
        """Restores what `save_state` saved; returns where to continue. Collective.

        Returns `Position()`, step 0, if there is no checkpoint yet.

        Args:
            source: A checkpoint, or a folder of checkpoints, of which the newest undamaged one is taken. Any number of
                ranks may have saved it.
            updater: What `distributed_optimizer` of this session has returned.
            loader: As in `save_state`.
            also: The objects that `save_state` was given; None for one that is not to be loaded.

        Raises CheckpointError on every rank, with nothing changed, if the checkpoint belongs to another model,
        optimizer, dataset, order or seed, or has other objects.
        """
        return self.trainings.load(source, updater, loader=loader, also=also or {})

    def open_dataset(self, directory: str | Path, **options: Any) -> Dataset:
        """Opens a dataset on every rank, or raises the same DataError on all. Collective.

        Raises also if the ranks of a node find other content than rank 0. options: of `hpctrain.data.open_together`.
        """
        return open_together(self.world, Path(directory), reads_manifest=self.leads_node, **options)

    @property
    def leads_node(self) -> bool:
        """True on the first rank of each node."""
        return self.topology.local_rank_of(self.rank) == 0

    def check(
        self, build: Build, *, steps: int = 4, show: bool = True, scratch: str | Path = "."
    ) -> CheckReport:
        """Compares the training that `build` makes with itself, and names causes. Collective; see `check_loop`."""
        return check_loop(self, build, steps=steps, show=show, scratch=Path(scratch))

    def on_close(self, close: Callable[[], object]) -> None:
        """Has `close` called when the session is closed, before communication ends. It may be collective."""
        self._closers.append(close)

    def loader(self, dataset: Samples, *, global_batch: int, seed: int = 0, **options: Any) -> Loader:
        """Returns a loader of this rank's part of each global batch. See `hpctrain.data.Loader` for the options."""
        data = self.axes.for_loader()
        return Loader(
            dataset,
            global_batch=global_batch,
            rank=data.index,
            num_ranks=data.size,
            seed=seed,
            pin_memory=self.device.type == "cuda",
            watch=self.world.inputs,
            **options,
        )

    def agreed_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches` with weights that count the damaged samples which any rank has skipped. Collective for each
        batch; see `hpctrain.data.check_while_reading`."""
        return agreed_batches(batches, comm=self.world)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Names the operations in the `with` block in the message that is printed when ranks wait too long in it."""
        return self.world.doing(what)

    def agreed(self, function: Callable[[], T], *, os_error: type[HpctrainError]) -> T:
        """Returns what `function` returns on this rank; raises the same error on all if any fails. Collective."""
        return agreed(self.world, function, os_error=os_error)

    def mean(self, value: float) -> float:
        """Returns the mean of a number over the ranks. Collective."""
        buffer = torch.tensor([float(value)], dtype=torch.float64)
        self.world.all_reduce(buffer)
        return float(buffer) / self.world_size

    @overload
    def all_reduce(self, value: torch.Tensor, *, op: Operation = "sum") -> torch.Tensor: ...
    @overload
    def all_reduce(self, value: Mapping[str, float], *, op: Operation = "sum") -> dict[str, float]: ...
    def all_reduce(
        self, value: torch.Tensor | Mapping[str, float], *, op: Operation = "sum"
    ) -> torch.Tensor | dict[str, float]:
        """Returns the sum, mean or maximum over the ranks: of a tensor, as a new tensor of its shape and dtype, or of
        numbers by name. Collective. Raises BufferMismatch and UsageError; see `all_reduce_values`."""
        return all_reduce_values(self.world, value, op=op)

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Returns `model` with batch normalisation over all ranks. Collective; see `convert_sync_batch_norm`."""
        if self.world_size == 1:
            return model
        comm = self.world.duplicate()
        model = self.agreed(lambda: convert_sync_batch_norm(model, comm), os_error=UsageError)
        if not communicates_in_forward(model):
            self.note("batch normalisation over the ranks was asked for, the model has none")
        return model

    def close(self) -> None:
        """Finishes communication. Collective."""
        self.end_training()
        release_all()
        self.world.close()

    def end_training(self) -> None:
        """Ends updaters, reductions and what `on_close` was given; communication stays open. Collective."""
        # The updaters' threads first: they use the reducers' memory, and may still gather parameters, which may fail.
        ended = [updater.close() for updater in self.trainings.updaters]
        self.uncaught_errors.release()
        self.reductions.close(free=is_true_everywhere(self.world, all(ended)))
        while self._closers:
            self._closers.pop()()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.uncaught_errors.end_all(error)
        self.close()


@uncaught_as_message
def init(
    *,
    backend: str = "auto",
    device: str = "auto",
    ranks: int | None = None,
    threads_per_rank: int | None = None,
    timeout_s: float = 600.0,
    algorithm: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Session:
    """Connects to the other ranks that mpirun or srun started; without a launcher, one rank. Collective.

    Args:
        backend: "auto", "mpi", "horovod" or "serial".
        device: "auto" (CUDA if every rank has a GPU of its own, else the CPU), "cpu", "cuda", or "cuda:N", which the
            ranks of a machine share.
        ranks: The number of ranks that there must be; None: any.
        threads_per_rank: Threads of PyTorch; None: OMP_NUM_THREADS, or else this rank's share of the cores.
        timeout_s: A collective that takes longer, or a rank that starts so much later than the first, ends the run
            with exit code 6, and all ranks have ended by then (see `Monitored`). After
            `session.world.publish_in(shared_folder)`, which is collective, the message names the ranks that did not
            take part.
        algorithm: The algorithm of the reduction, if Horovod must know it when it starts (nccl-hierarchical,
            nccl-torus).
        environ: Variables to read the launcher's from; None: those of this process.

    Raises LaunchError or TopologyError if launcher, environment and communication library disagree.
    """
    postpone_dynamo()
    keep_freed_memory()
    identity = identify(environ if environ is not None else os.environ, socket.gethostname())
    check_num_ranks(identity, ranks=ranks)
    with starting(identity, timeout_s=timeout_s):
        opened = open_world(backend, identity=identity, algorithm=algorithm, device=device)
    world = Monitored(opened.world, timeout_s=timeout_s)
    mine = [identity.node_name, identity.emulated, read_cores().to_json(), may_starve()]
    found, number_of_rank = all_gather_distinct(world, mine)
    different_cores = [RankCores.from_json(entry[2]) for entry in found]
    cores = [different_cores[number] for number in number_of_rank]
    everyone = [found[number] for number in number_of_rank]
    set_threads(threads_per_rank, core_share(cores, world.rank))
    emulated = any(entry[1] for entry in everyone)
    topology = Topology.from_node_names([entry[0] for entry in everyone], emulated=emulated)
    world.place(topology)
    chosen_device, reason = choose_device(device, comm=world, hosts=[of_rank.host for of_rank in cores])
    session = Session(
        identity=identity, world=world, topology=topology, device=chosen_device, horovod=opened.horovod,
        backend_reason=opened.reason, cores=cores,
    )  # fmt: skip
    crowd = describe_crowd(cores, may_starve=[entry[3] for entry in everyone])
    for note in (*opened.notes, *filter(None, [reason, crowd])):
        session.note(note)
    session.uncaught_errors.watch()  # also outside a `with` block
    return session
