"""The session of a run: an object that holds the run's communicator, topology and device, without module state."""

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
)
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch import (
    RankCores,
    RankIdentity,
    core_share,
    describe_oversubscription,
    identify,
    lacks_yield_library,
    read_cores,
)
from hpctrain.public_names import warn_of_old_name
from hpctrain.reduce import (
    AUTO,
    CompareRanks,
    LossScale,
    Reduction,
    ReductionRequest,
    SspUpdater,
    StepWatch,
    check_for_layouts,
    layouts_of,
    use_fused_kernels,
    watch_steps,
)
from hpctrain.resilience import give_back_large_pieces, keep_freed_memory
from hpctrain.run.compute.device import choose_device
from hpctrain.run.compute.postponed_dynamo import postpone_dynamo
from hpctrain.run.compute.ranks import RankAxes, check_num_ranks, set_torch_threads
from hpctrain.run.compute.uncaught_errors import UncaughtErrors, uncaught_as_message
from hpctrain.run.experiments.causes.findings import CheckReport
from hpctrain.run.experiments.own_loop import Build, check_loop
from hpctrain.run.reductions import Reductions
from hpctrain.storage import release_all
from hpctrain.telemetry import tell
from hpctrain.topology import Mesh, Topology
from hpctrain.train import (
    FiniteCheck,
    Position,
    SessionUpdater,
    SharedBatches,
    Stateful,
    Trainings,
    agreed_batches,
    communicates_in_forward,
    convert_sync_batch_norm,
)

T = TypeVar("T")


@final
class Session:
    """A rank's connection to the other ranks of the run, and the entry point to everything collective.

    `hpctrain.init` returns a session, to be used as a context manager. When the `with` block raises an error that all
    ranks share, rank 0 prints the error once, and every rank exits with the exit code of the error. An error of a
    single rank is printed with the index of that rank and aborts the whole job, so that no other rank waits.

    Attributes:
        identity: What the launcher says of this process, such as its rank and its node.
        world: The communicator of all ranks. The operations of this communicator have the time limit of `init`.
        mesh: The topology of the ranks, and this rank's place in it.
        device: The device on which this rank computes.
        backend_reason: Why this communication backend was chosen, for the record of the run.
        notes: The texts given to `note`, such as fallbacks with their reasons.
        reductions: The methods by which gradients are summed, and the measurement that chooses one.
        axes: The axes (pipeline, data, tensor) along which the ranks are arranged.
        trainings: The pairs of model and optimizer that `distributed_optimizer` has wrapped.
        uncaught_errors: The handler of errors that leave the `with` block or the program.
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
        """Stores what `init` has opened. Does not communicate.

        Args:
            identity: What the launcher says of this process.
            world: The communicator of all ranks.
            topology: The ranks of each node.
            device: The device of this rank.
            horovod: Horovod's library, if it runs the communication.
            backend_reason: Why this backend was chosen, for the record of the run.
            cores: The cores of each rank, by rank; None: `gather_cores` gathers them.
        """
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
        """Returns the cores of all ranks, by rank. Collective at the first call if `init` has not gathered them."""
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
        """The index of this rank, from 0 to `world_size` - 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.world.num_ranks

    @property
    def local_rank(self) -> int:
        """The index of this rank among the ranks of its node, from 0."""
        return self.topology.local_rank_of(self.rank)

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this rank's node."""
        return len(self.topology.ranks_by_node[self.topology.node_of(self.rank)])

    @property
    def num_ranks(self) -> int:
        """Deprecated name of `world_size`."""
        warn_of_old_name("session.num_ranks", use="session.world_size")
        return self.world_size

    def note(self, text: str) -> None:
        """Adds a note for the user. Rank 0 prints the note at once, and the record of the run keeps it."""
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
        fused: bool = False,
        schedule: Mapping[str, Any] | None = None,
    ) -> SessionUpdater:
        """Wraps `optimizer` so that its steps use the gradients of all ranks. Collective.

        Copies rank 0's parameters and buffers to all ranks first. Replaces `hvd.DistributedOptimizer` and the two
        broadcasts of a plain Horovod script; `loss.backward()`, `step()` and `zero_grad()` are used as before.

        Args:
            model: The model, whole or split by `parallelize`.
            optimizer: An optimizer of the model's parameters. Parameters outside the model are copied and saved too,
                unless the model is split.
            algorithm: The algorithm that sums the gradients; "auto" measures the candidates and takes the fastest. For
                sharded parameters see `reduce_gradients_by`. Ignored for split layers and pipelines.
            wire: The format in which gradients are sent. Ignored where `algorithm` is ignored.
            bucket_bytes: Bytes of gradients per message; None: chosen by `algorithm`. `SplitModelUpdater` ignores it.
            loss_scale: The loss scale for float16; None: no scaling.
            clip_norm: The largest allowed norm of the mean gradient; None: no limit.
            reduction: A reduction from `reductions.make`, used instead of `algorithm`, `wire` and `bucket_bytes`.
                Ignored for a `SplitModelUpdater`.
            compare_ranks: What `step` does when parameters or optimizer settings differ between ranks. "error" raises
                RanksDiffer, "note" prints one note, "off" does not compare.
            fused: Use PyTorch's fused kernels in groups of an SGD, Adam, AdamW or Adagrad that set neither `fused` nor
                `foreach`. With fused kernels, parameters differ from those of the plain optimizer by rounding.
            schedule: The table of the recipe's key `reduction.schedule`, such as `{"method": "local-sgd", "every":
                50}`: ranks synchronise less often. None: in every step. `reduction` is then that of the averages.

        Returns:
            The wrapped optimizer: a `SplitModelUpdater` for sharded parameters, split layers and pipelines, and
                on more than one rank a `ZeroUpdater` for a model with `shard = "optimizer"` or `"gradients"`; with a
                schedule a `ScheduledUpdater`.

        Raises:
            BufferMismatch: On every rank, naming the ranks that differ, if a rank has another model, or trains other
                parameters of the model.
            UsageError: On every rank, if no checkpoint can hold the state of the model or optimizer, or if the
                optimizer cannot be stepped.
        """
        shard, pipeline = shard_of(model), pipeline_of(model)
        if fused:
            use_fused_kernels(optimizer)
        training = self.agreed(lambda: self.trainings.parts_for(model, optimizer), os_error=UsageError)
        layouts = layouts_of(model, num_ranks=self.world_size)
        self.agreed(lambda: check_for_layouts(optimizer, layouts, model=model), os_error=UsageError)
        request = ReductionRequest(algorithm=algorithm, wire=wire, bucket_bytes=bucket_bytes)
        planned = self.reductions.planned(schedule, model, optimizer, algorithm=algorithm, wire=wire)
        updater: SessionUpdater
        if is_sharded(model) or pipeline is not None:
            updater = self.reductions.split(
                model, optimizer, algorithm=algorithm, wire=wire, loss_scale=loss_scale, clip_norm=clip_norm
            )
        else:
            broadcast_model(self.world, model)
            outside = list(training.outside.values())
            broadcast_tensors(self.world, outside, name="parameters outside the model")
            updater = self.reductions.updater(
                planned, model, optimizer, request=request, reduction=reduction, shard=shard, loss_scale=loss_scale,
                clip_norm=clip_norm,
            )  # fmt: skip
        self.trainings.add(updater, training)
        return watch_steps(
            updater, model, comm=self.world, say=self.note, together=self._watches,
            compare_ranks="off" if isinstance(updater, SspUpdater) else compare_ranks,
        )  # fmt: skip

    def updater(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> SessionUpdater:
        """Deprecated name of `distributed_optimizer`."""
        warn_of_old_name("session.updater", use="session.distributed_optimizer")
        return self.distributed_optimizer(model, optimizer, **options)

    def parallelize(self, model: torch.nn.Module, plan: ParallelPlan) -> torch.nn.Module:
        """Splits `model` over the ranks as `plan` says, in place, and returns it. Collective.

        Call it before the optimizer is made.

        Args:
            model: The model.
            plan: What is split, over which ranks.

        Raises:
            UsageError: On every rank, with nothing changed, if the plan does not match the model.
            TopologyError: On every rank, with nothing changed, if the plan does not match the number or placement of
                the ranks.
            LaunchError: If the plan needs MPI and the session has none.
        """
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
            give_back_large_pieces()  # the memory of the whole model
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
        """Saves a checkpoint with the complete state of a training. Collective.

        It holds the states of the model, the optimizer, the updater and the random generators, and `position`.

        Args:
            directory: The folder of the checkpoints, on a filesystem that all nodes share. The new checkpoint is named
                by `position.step`.
            updater: The result of this session's `distributed_optimizer`.
            position: Where training continues after a load.
            loader: The loader whose dataset, order and seed `position` refers to; `load_state` compares them.
            options: How to save, and which older checkpoints to keep. None: the last three are kept.
            also: Other objects with `state_dict` and `load_state_dict`, by name, such as schedulers. Their states go
                into the same checkpoint, and must be the same on every rank.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: On every rank, with the older checkpoints unchanged, if the state cannot be written or the
                state of an object in `also` differs between ranks.
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
        """Restores a training from a checkpoint that `save_state` has written. Collective.

        Args:
            source: A checkpoint, or a folder of checkpoints, of which the newest undamaged checkpoint is loaded. The
                checkpoint may have been saved by another number of ranks.
            updater: The result of this session's `distributed_optimizer`.
            loader: The loader of the training, as in `save_state`.
            also: The same names as in `save_state`, each with the object to restore, or with None to skip the object.

        Returns:
            Where to continue. `Position()`, step 0, if there is no checkpoint yet.

        Raises:
            CheckpointError: On every rank, with nothing changed, if the checkpoint belongs to another model, optimizer,
                dataset, order or seed, or has other objects than `also`.
        """
        return self.trainings.load(source, updater, loader=loader, also=also or {})

    def open_dataset(self, directory: str | Path, **options: Any) -> Dataset:
        """Opens a packed dataset on all ranks and returns it. Collective.

        Args:
            directory: The folder of the dataset.
            **options: Options of `hpctrain.data.open_together`.

        Raises:
            DataError: The same on all ranks, if the dataset cannot be opened or a node finds other content than rank 0.
        """
        return open_together(self.world, Path(directory), reads_manifest=self.leads_node, **options)

    @property
    def leads_node(self) -> bool:
        """True on the first rank of each node."""
        return self.topology.local_rank_of(self.rank) == 0

    def check(
        self, build: Build, *, steps: int = 4, show: bool = True, scratch: str | Path = "."
    ) -> CheckReport:
        """Compares runs of the training that `build` creates, and finds why they differ. Collective; see `check_loop`.

        Args:
            build: A function that builds the training.
            steps: The number of steps to compare.
            show: Whether rank 0 prints the result.
            scratch: A folder that all nodes share, for a few checkpoints, which are removed.

        Returns:
            What was compared and the causes that were found, the most probable first.

        Raises:
            UsageError: On every rank, if there are fewer than two ranks or the training fails on one rank.
            LaunchError: If no folder can be created in `scratch`.
            CheckpointError: If the checkpoints cannot be written there.
        """
        return check_loop(self, build, steps=steps, show=show, scratch=Path(scratch))

    def on_close(self, close: Callable[[], object]) -> None:
        """Registers a function that `close` calls before communication ends. The function may be collective."""
        self._closers.append(close)

    def loader(self, dataset: Samples, *, global_batch: int, seed: int = 0, **options: Any) -> Loader:
        """Returns a loader that yields this rank's part of each global batch.

        Args:
            dataset: The dataset, or another source of samples.
            global_batch: The number of samples per step over all ranks.
            seed: The seed of the order of the samples.
            **options: Further options of `hpctrain.data.Loader`.
        """
        data = self.axes.for_loader()
        return Loader(
            dataset, global_batch=global_batch, rank=data.index, num_ranks=data.size, seed=seed,
            pin_memory=self.device.type == "cuda", watch=self.world.inputs, **options,
        )  # fmt: skip

    def shared_batches(
        self, updater: SessionUpdater, loader: Loader, *, position: Position, steps: int
    ) -> SharedBatches:
        """Returns the batches of the next `steps` steps, which ranks take from one order; see `SharedBatches`.

        Args:
            updater: An updater with the schedule "ssp".
            loader: The loader, the same on every rank. Batches are read when they are taken.
            position: Where training is; `position` of the result is where it continues after the loop.
            steps: The number of steps of all ranks together.

        Raises:
            UsageError: If the updater has another schedule, or the loader needs all ranks for each batch.
        """
        return SharedBatches(updater, loader, position=position, steps=steps, watch=self.world.inputs)

    def agreed_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches` with weights that do not count the damaged samples that any rank has skipped.

        Fetching a batch is collective; see `hpctrain.data.check_while_reading`.
        """
        return agreed_batches(batches, comm=self.world)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Names the operations of a `with` block for the message that is printed when ranks wait too long in it."""
        return self.world.doing(what)

    def agreed(self, function: Callable[[], T], *, os_error: type[HpctrainError]) -> T:
        """Runs a function on every rank, and fails on all ranks if it fails on one. Collective.

        Args:
            function: A function that does not communicate.
            os_error: The class of error that is raised in place of an OSError of the function.

        Returns:
            This rank's result of the function.

        Raises:
            HpctrainError: The same error on all ranks.
        """
        return agreed(self.world, function, os_error=os_error)

    def mean(self, value: float) -> float:
        """Returns the mean of a number over all ranks. Collective."""
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
        """Returns the sum, mean or maximum of values over all ranks. Collective.

        Args:
            value: A tensor of the same shape and dtype on every rank, or numbers by name with the same names on every
                rank.
            op: "sum", "mean" or "max".

        Returns:
            A new tensor of the same shape and dtype, or the reduced numbers by name.

        Raises:
            BufferMismatch: If numbers of elements, dtypes or names differ between ranks.
            UsageError: If the values cannot be reduced; see `all_reduce_values`.
        """
        return all_reduce_values(self.world, value, op=op)

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Makes the batch normalisation layers of a model use the statistics of all ranks. Collective.

        Returns:
            The converted model; see `convert_sync_batch_norm`. On one rank `model` itself.
        """
        if self.world_size == 1:
            return model
        comm = self.world.duplicate()
        model = self.agreed(lambda: convert_sync_batch_norm(model, comm), os_error=UsageError)
        if not communicates_in_forward(model):
            self.note("batch normalisation over the ranks was asked for, but the model has no such layer")
        return model

    def close(self) -> None:
        """Ends trainings, datasets and communication. Collective."""
        self.end_training()
        release_all()
        self.world.close()

    def end_training(self) -> None:
        """Ends updaters and reductions and calls the functions of `on_close`; communication stays open. Collective."""
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
    """Connects this process to the other ranks that mpirun or srun started. Collective. Without a launcher, one rank.

    Args:
        backend: "auto", "mpi", "horovod" or "serial".
        device: "cpu", "cuda", or "cuda:N", which the ranks of a node then share. "auto" takes CUDA if every rank has a
            GPU of its own, else the CPU.
        ranks: The number of ranks that is expected; None: any.
        threads_per_rank: The number of PyTorch threads. None: OMP_NUM_THREADS if set, else this rank's share of the
            cores.
        timeout_s: The time limit in seconds of a collective operation, and of the start of the other ranks after the
            first one has started. When this time has passed, all ranks end with exit code 6 (see `Monitored`). If
            `session.world.publish_in(shared_folder)`, which is collective, was called before, the message names the
            ranks that did not take part.
        algorithm: The algorithm of the gradient reduction, if Horovod must know it when it starts (nccl-hierarchical,
            nccl-torus).
        environ: The environment variables of the launcher; None: those of this process.

    Returns:
        The session.

    Raises:
        LaunchError: If launcher, environment and communication library disagree.
        TopologyError: If the number or placement of the ranks is not as requested.
    """
    postpone_dynamo()
    keep_freed_memory()
    identity = identify(environ if environ is not None else os.environ, socket.gethostname())
    check_num_ranks(identity, ranks=ranks)
    with starting(identity, timeout_s=timeout_s):
        opened = open_world(backend, identity=identity, algorithm=algorithm, device=device)
    world = Monitored(opened.world, timeout_s=timeout_s)
    mine = [identity.node_name, identity.emulated, read_cores().to_json(), lacks_yield_library()]
    found, number_of_rank = all_gather_distinct(world, mine)
    different_cores = [RankCores.from_json(entry[2]) for entry in found]
    cores = [different_cores[number] for number in number_of_rank]
    everyone = [found[number] for number in number_of_rank]
    set_torch_threads(threads_per_rank, core_share(cores, world.rank))
    emulated = any(entry[1] for entry in everyone)
    topology = Topology.from_node_names([entry[0] for entry in everyone], emulated=emulated)
    world.place(topology)
    chosen_device, reason = choose_device(device, comm=world, hosts=[of_rank.host for of_rank in cores])
    session = Session(
        identity=identity, world=world, topology=topology, device=chosen_device, horovod=opened.horovod,
        backend_reason=opened.reason, cores=cores,
    )  # fmt: skip
    oversubscription = describe_oversubscription(cores, lacks_library=[entry[3] for entry in everyone])
    for note in (*opened.notes, *filter(None, [reason, oversubscription])):
        session.note(note)
    session.uncaught_errors.watch()  # also outside a `with` block
    return session
