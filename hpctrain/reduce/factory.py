"""Creates the reducer and the updater for the names in a recipe.

If a named algorithm is not available, its fallback is used; `auto` chooses by measurements.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import xxhash

from hpctrain.comm import Collective, Transport, World, broadcast_json, is_true_everywhere, make_two_level
from hpctrain.distributed import ShardKind, is_sharded, pipeline_of, shard_of, split_of
from hpctrain.errors import CommunicationError, UsageError
from hpctrain.reduce.algorithms import (
    LIBRARY_ALGORITHMS,
    Algorithm,
    AlgorithmChoice,
    Capabilities,
    candidates,
    choose_algorithm,
    parse_algorithm,
)
from hpctrain.reduce.autotune.decision import DEFAULT_BUCKET_BYTES
from hpctrain.reduce.autotune.link_speed import Candidate
from hpctrain.reduce.autotune.tune import CalibrationFiles, find_choice
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.adasum import AdasumReducer
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, InBackground, Shapes, StateTensor
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.reduce.contract.updater import Layout, check_optimizer, takes_sparse_gradients
from hpctrain.reduce.data_parallel.all_reduce_updater import AllReduceUpdater
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.sparse_updater import SparseUpdater
from hpctrain.reduce.schedules.schedule import Adasum
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.shared_memory.shared_buckets import one_rank_nodes
from hpctrain.reduce.shared_memory.summation import COMPILED
from hpctrain.reduce.wire_formats import (
    AUTO,
    AUTO_WIRES,
    CODEC_WIRES,
    check_wire,
    encodes_every_value,
    needs_feedback,
    wire_format,
)
from hpctrain.reduce.zero.zero_reducer import ZeroReducer
from hpctrain.reduce.zero.zero_updater import ZeroUpdater
from hpctrain.topology import Topology


@final
class LocalReducer(StepEnd):
    """`BucketReducer` for one rank, which does nothing, so that no value is rounded.

    wire: the requested wire format, from which the updater derives the same defaults as with several ranks.
    """

    def __init__(self, *, wire: str = "fp32") -> None:
        self._wire = wire

    @property
    def algorithm(self) -> str:
        return "flat"

    @property
    def wire(self) -> str:
        return self._wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        memory = [torch.zeros(bucket.numel, dtype=bucket.dtype, device=device) for bucket in buckets]
        self._will_finish(buckets, memory)
        return memory

    def reduce(self, number: int) -> Iterator[bool]:
        return iter(())

    def end_step(self, *, applied: bool, rescale: float) -> None: ...

    def bytes_sent(self) -> int:
        return 0

    def state(self) -> list[StateTensor]:
        return []

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return {}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None: ...

    def close(self) -> None: ...


_SHARED_MEMORY = Path("/dev/shm")
# Usable share of the free shared memory; the rest is for others (MPI itself, loaders).
_SHARED_SHARE = 0.8


@final
class ReducerMaker:
    """Makes the reducers of one run.

    The constructor is collective over `world`.

    device: type of the device that holds the gradients, such as `cuda`.
    gradient_bytes: size of one rank's buckets, to check that a node's shared memory can hold the buckets of its ranks.
    nccl: Horovod's NCCL algorithm that is switched on in this process; None if no such algorithm is switched on.
    note: function that is called with a text for the user, for example if another algorithm than the requested one is
    used. The same text is passed only once.
    """

    def __init__(
        self,
        world: World,
        *,
        topology: Topology,
        device: str = "cpu",
        gradient_bytes: int = 0,
        nccl: Algorithm | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._world = world
        self._topology = topology
        self._note = note
        self._reported: set[str] = set()
        probe = world.transport(topology) if world.num_ranks > 1 else None
        if probe is not None:
            probe.close()
        self.capabilities = Capabilities(
            backend=world.reduction_backend,
            topology=topology,
            messages=probe is not None,
            shared_memory=world.backend == "threads"
            or _fits_shared_memory(world, topology, gradient_bytes=gradient_bytes),
            device=device,
            nccl=nccl,
        )

    def candidates(self, *, wire: str) -> list[str]:
        """Returns the algorithms that are available with this wire format, without fallback. Not collective."""
        return [algorithm.value for algorithm in candidates(wire=wire, capabilities=self.capabilities)]

    def make(self, algorithm: Algorithm, *, wire: str) -> BucketReducer:
        """Makes a reducer with a separate message space. `close` of the reducer frees the message space. Collective.

        If `algorithm` is not available, makes the reducer of the fallback and reports it through `note`. Raises
        UsageError for an unknown wire format.
        """
        check_wire(wire)
        decision = choose_algorithm(algorithm, wire=wire, capabilities=self.capabilities)
        if decision.note is not None:
            self._note_once(decision.note)
        if self.capabilities.topology.num_ranks == 1:
            return LocalReducer(wire=wire)
        if not encodes_every_value(wire):
            return self.make_sparse(wire)
        if decision.algorithm in LIBRARY_ALGORITHMS:
            return self._of_library(decision.algorithm, wire=wire)
        if decision.algorithm is Algorithm.DIRECT and not self.capabilities.messages:
            return CollectiveReducer.direct(
                self._world.duplicate(), topology=self._topology, codec=codec_named(wire),
                feedback=needs_feedback(wire),
            )  # fmt: skip
        return self._of_hpctrain(decision.algorithm, wire=wire)

    def make_sparse(self, wire: str, **options: Any) -> BucketReducer:
        """Makes the reducer of a wire format that does not send every value, such as top-k. Collective.

        options: arguments of the reducer's class.
        """
        reducer: BucketReducer = wire_format(wire).imported()(
            self._world.duplicate(), topology=self._topology, **options
        )
        return reducer

    def make_zero(self, algorithm: str, *, wire: str) -> ZeroReducer:
        """Makes the reducer of a sharded optimizer: in two levels or, for `direct`, in one level. Collective.

        Raises UsageError on every rank for a wire format without a codec, or if the backend has no point-to-point
        messages.

        algorithm: name of an algorithm, or `auto`. If another algorithm runs than the named one, `note` reports it.
        """
        check_wire(wire)
        if not encodes_every_value(wire):
            raise UsageError(
                f"wire format {wire!r} does not send each value to its owner, which a sharded optimizer needs: choose "
                f"one of {', '.join(CODEC_WIRES)}",
                agreed=True,
            )
        if not self.capabilities.messages:
            raise UsageError(
                f"the backend {self.capabilities.backend} has no point-to-point messages here, which a sharded "
                "optimizer needs: use run.backend = 'mpi', or shard = 'none'",
                agreed=True,
            )
        wanted = Algorithm.HIERARCHICAL if algorithm == AUTO else parse_algorithm(algorithm)
        two_levels = wanted is not Algorithm.DIRECT
        runs = (
            choose_algorithm(
                Algorithm.HIERARCHICAL, wire=wire, capabilities=self.capabilities, sums_itself=True
            )
            if two_levels
            else AlgorithmChoice(wanted)
        )
        if wanted is Algorithm.HIERARCHICAL and algorithm != AUTO and runs.note is not None:
            self._note_once(runs.note)
        elif algorithm not in (AUTO, runs.algorithm.value):
            self._note_once(
                f"reduction: {algorithm} was asked for, {runs.algorithm.value} is used: the gradients of a sharded "
                "optimizer are sent to their owners"
            )
        return ZeroReducer(
            self._transport(),
            comm=self._world.duplicate(),
            levels=self._levels(runs.algorithm),
            algorithm=runs.algorithm.value,
            codec=codec_named(wire),
            feedback=needs_feedback(wire),
        )

    def make_adasum(self, schedule: Adasum) -> BucketReducer:
        """Makes the reducer that combines gradients by Adasum instead of summing them. Collective."""
        if self.capabilities.topology.num_ranks == 1:
            return LocalReducer()
        levels = make_two_level(self._world, self._topology) if schedule.within_node == "mean" else None
        return AdasumReducer(self._world.duplicate(), topology=self._topology, levels=levels)

    def _levels(self, algorithm: Algorithm) -> Topology:
        two_levels = algorithm in (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING)
        return self._topology if two_levels else one_rank_nodes(self._topology.num_ranks)

    def _of_library(self, algorithm: Algorithm, *, wire: str) -> CollectiveReducer:
        """Makes a reducer that uses the operations of the reduction backend. Collective.

        The reducer's `close` also closes the world of that backend.
        """
        world = self._world.open_reduction_world()
        if algorithm is Algorithm.HIERARCHICAL_FLAT:
            levels = make_two_level(world, self._topology)
            return CollectiveReducer.hierarchical(
                world, levels=levels, topology=self._topology, wire=wire, on_close=world.close
            )
        return CollectiveReducer.flat(
            world, topology=self._topology, wire=wire, name=algorithm.value, on_close=world.close
        )

    def _of_hpctrain(self, algorithm: Algorithm, *, wire: str) -> AllReduceReducer:
        ring = algorithm in (Algorithm.RING, Algorithm.HIERARCHICAL_RING)
        if COMPILED is None:
            self._note_once(
                "sums within a node are computed by numpy, which is slower, because the extension is not compiled: "
                "see hpctrain doctor"
            )
        return AllReduceReducer(
            self._transport(),
            comm=self._world.duplicate(),
            levels=self._levels(algorithm),
            algorithm=algorithm.value,
            exchange="ring" if ring else "direct",
            codec=codec_named(wire),
            feedback=needs_feedback(wire),
        )

    def _note_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._note(text)

    def _transport(self) -> Transport:
        transport = self._world.transport(self._topology)
        if transport is None:
            raise CommunicationError(f"the backend {self._world.backend} has no point-to-point messages")
        return transport


def _fits_shared_memory(world: World, topology: Topology, *, gradient_bytes: int) -> bool:
    """Returns True if the shared memory of every node can hold the buckets of its ranks. Collective.

    Returns the same on every rank.
    """
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    # Emulated nodes share one machine's memory, so all ranks are counted there.
    most = max(len(ranks) for ranks in topology.ranks_by_node)
    num_sharers = topology.num_ranks if topology.emulated else most
    needed = gradient_bytes * num_sharers
    return is_true_everywhere(world, free * _SHARED_SHARE >= needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """The requested reduction.

    algorithm: name of an algorithm, or `auto`.
    wire: name of a wire format, or `auto`.
    bucket_bytes: maximum size of a bucket's gradients, in bytes; None: hpctrain chooses the size.
    adasum: how gradients are combined instead of summed; None: they are summed.
    files: files in which measurements are kept between runs.
    """

    algorithm: str = AUTO
    wire: str = "fp32"
    bucket_bytes: int | None = None
    adasum: Adasum | None = None
    files: CalibrationFiles = field(default_factory=CalibrationFiles)

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown algorithm or wire format, and for either of them together with Adasum."""
        if self.algorithm != AUTO:
            parse_algorithm(self.algorithm)
        check_wire(self.wire)
        if self.adasum is not None and (self.algorithm != AUTO or self.wire != "fp32"):
            raise UsageError(
                f"schedule adasum was given with algorithm={self.algorithm!r} and wire={self.wire!r}, which are for "
                "sums: Adasum sends float32 between all ranks, or between nodes with within_node='mean'; leave "
                "algorithm and wire out"
            )


@dataclass(slots=True, kw_only=True)
class Reduction:
    """A reducer, and how it was chosen.

    If measurements have chosen the reducer, the updater may replace this reducer by the choice of a loaded checkpoint:
    see `MeasuredChoice`.

    Attributes:
        reducer: The reducer; a `ZeroReducer` for a sharded optimizer.
        wire: Name of the wire format.
        bucket_bytes: Maximum size of a bucket's gradients, in bytes.
        overlap: True if buckets are reduced during backward.
        oversubscribed: True if there are more ranks than cores, and buckets are reduced during backward.
        record: The choice and its measurements, as JSON values.
        is_measured: True if measurements chose the algorithm or the wire format.
        alternatives: The candidates among which the measurements chose.
        maker: The object that makes the reducers of `alternatives`; None if nothing was measured.
        asked_bucket_bytes: The bucket size that the user asked for; None if it was chosen.
        note: Function that is called with a text for the user if the choice is replaced.
    """

    reducer: BucketReducer | ZeroReducer
    wire: str
    bucket_bytes: int
    overlap: bool
    oversubscribed: bool
    record: dict[str, Any]
    is_measured: bool = False
    alternatives: tuple[Candidate, ...] = ()
    maker: ReducerMaker | None = None
    asked_bucket_bytes: int | None = None
    note: Callable[[str], None] = lambda text: None

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that runs, after `auto: ` if measurements have chosen the reduction."""
        return f"auto: {self.reducer.algorithm}" if self.is_measured else self.reducer.algorithm

    def updater(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        model: torch.nn.Module,
        loss_scale: LossScale | None,
        clip_norm: float | None,
    ) -> AllReduceUpdater | ZeroUpdater | SparseUpdater:
        """Returns an updater that uses this reducer. Collective.

        For an optimizer that takes only sparse gradients, the result is an updater that gathers gradients and does not
        use the reducer.

        comm: the communicator of all ranks.
        model: the model whose parameters the optimizer steps.
        """
        if takes_sparse_gradients(optimizer):
            if isinstance(self.reducer, AdasumReducer):
                raise UsageError(
                    f"{type(optimizer).__name__} takes sparse gradients, which schedule adasum does not combine: use "
                    "Embedding(sparse=False) and Adam, or leave the schedule out",
                    agreed=True,
                )
            return SparseUpdater(
                optimizer, comm=comm, loss_scale=loss_scale, clip_norm=clip_norm, model=model
            )
        given: dict[str, Any] = {
            "comm": comm, "bucket_bytes": self.bucket_bytes, "loss_scale": loss_scale, "clip_norm": clip_norm,
            "overlap": self.overlap, "oversubscribed": self.oversubscribed,
        }  # fmt: skip
        if isinstance(self.reducer, ZeroReducer):
            keeps = shard_of(model) != "gradients"
            return ZeroUpdater(optimizer, reducer=self.reducer, keeps_gradients=keeps, model=model, **given)
        choice = self if self.is_measured else None
        return AllReduceUpdater(optimizer, reducer=self.reducer, model=model, choice=choice, **given)

    def document(self) -> dict[str, Any]:
        """See `MeasuredChoice.document`."""
        assert self.maker is not None
        # A digest, since a checkpoint must not grow with the number of ranks.
        placement = repr(self.maker.capabilities.topology.ranks_by_node)
        return {
            "algorithm": self.reducer.algorithm, "wire": self.wire, "bucket_bytes": self.bucket_bytes,
            "placement": xxhash.xxh3_64_hexdigest(placement.encode()),
        }  # fmt: skip

    def can_become(self, saved: Any) -> bool:
        """See `MeasuredChoice.can_become`."""
        now = self.document()
        if not isinstance(saved, Mapping) or saved.keys() != now.keys():
            return False
        wanted = {**now, **saved, "bucket_bytes": self.asked_bucket_bytes or saved["bucket_bytes"]}
        possible = Candidate(saved["algorithm"], saved["wire"]) in self.alternatives
        return possible and wanted != now and saved["placement"] == now["placement"]

    def become(self, saved: Mapping[str, Any]) -> tuple[BucketReducer, int]:
        """See `MeasuredChoice.become`."""
        assert self.maker is not None
        measured = f"{self.reducer.algorithm}, {self.wire}, buckets of {self.bucket_bytes} bytes"
        self.reducer.close()
        self.wire = str(saved["wire"])
        self.bucket_bytes = self.asked_bucket_bytes or int(saved["bucket_bytes"])
        made = self.maker.make(Algorithm(saved["algorithm"]), wire=self.wire)
        self.reducer = made
        self.record |= {
            "source": "as in the checkpoint", "algorithm": made.algorithm, "wire": self.wire,
            "bucket_bytes": self.bucket_bytes,
        }  # fmt: skip
        self.note(
            f"reduction: {made.algorithm}, {self.wire}, buckets of {self.bucket_bytes} bytes, as in the checkpoint, so "
            f"that sums are rounded as before; the measurements of this start chose {measured}"
        )
        return made, self.bucket_bytes

    @property
    def by_library(self) -> bool:
        """True if the algorithm uses the operations of the run's reduction backend."""
        return any(algorithm.value == self.reducer.algorithm for algorithm in LIBRARY_ALGORITHMS)


def make_reduction(
    world: World,
    plan: ReductionRequest,
    *,
    topology: Topology,
    device: torch.device,
    gradient_bytes: int,
    shard: ShardKind = "none",
    overlap: bool = True,
    spare_core: bool = True,
    oversubscribed: bool = False,
    nccl: Algorithm | None = None,
    note: Callable[[str], None],
) -> Reduction:
    """Creates the reducer that `plan` requests or, if it is not available, the fallback of that reducer. Collective.

    With `auto`, measures for at most two seconds, unless a file has the result.

    Args:
        gradient_bytes: The size of one rank's gradients, in bytes.
        shard: What is sharded. Unless `shard` is "none", the reducer is one for a `ZeroUpdater`.
        overlap: True if reductions run during backward.
        spare_core: True if each rank has a core that its threads leave free.
        oversubscribed: True if there are more ranks than cores, and buckets are reduced during backward.
        nccl: The NCCL algorithm that Horovod uses; None if Horovod uses none.
        note: Function that is called with a text for the user, for example about a fallback.
    """
    maker = ReducerMaker(
        world, topology=topology, device=device.type, gradient_bytes=gradient_bytes, nccl=nccl, note=note
    )
    if plan.adasum is not None:
        if shard != "none":
            raise UsageError(
                f"schedule adasum cannot be combined with shard = {shard!r}: Adasum needs the whole gradient of each "
                "parameter on every rank; leave one of them out",
                agreed=True,
            )
        bucket_bytes = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
        record = {
            "source": "schedule adasum", "within_node": plan.adasum.within_node, "wire": "fp32",
            "bucket_bytes": bucket_bytes, "overlap": overlap,
        }  # fmt: skip
        return Reduction(
            reducer=maker.make_adasum(plan.adasum), wire="fp32", bucket_bytes=bucket_bytes, overlap=overlap,
            oversubscribed=oversubscribed, record=record,
        )  # fmt: skip
    if shard != "none" and world.num_ranks > 1:
        wire = "fp32" if plan.wire == AUTO else plan.wire
        zero = maker.make_zero(plan.algorithm, wire=wire)
        bucket_bytes = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
        record = {
            "source": f"parallel.shard = {shard}", "wire": wire, "bucket_bytes": bucket_bytes, "overlap": overlap,
        }  # fmt: skip
        return Reduction(
            reducer=zero, wire=wire, bucket_bytes=bucket_bytes, overlap=overlap,
            oversubscribed=oversubscribed, record=record,
        )  # fmt: skip
    if AUTO not in (plan.algorithm, plan.wire):
        reducer = maker.make(parse_algorithm(plan.algorithm), wire=plan.wire)
        bucket_bytes = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
        if isinstance(reducer, InBackground) and reducer.in_background(0):
            # Horovod's thread continues these sums during backward; a second thread that waits for them needs a core.
            overlap = overlap and (spare_core or device.type != "cpu")
        record = {
            "source": "as asked for",
            "wire": plan.wire,
            "bucket_bytes": bucket_bytes,
            "overlap": overlap,
        }
        return Reduction(
            reducer=reducer, wire=plan.wire, bucket_bytes=bucket_bytes, overlap=overlap, oversubscribed=oversubscribed,
            record=record,
        )  # fmt: skip
    # All ranks choose for rank 0's model. If a rank has another one, comparing the plans of the buckets names it.
    gradient_bytes = broadcast_json(world, gradient_bytes)
    alternatives = _candidates(plan, maker)
    measured = find_choice(
        world, make=lambda algorithm, wire: maker.make(Algorithm(algorithm), wire=wire),
        candidates=alternatives, topology=topology, device=device, files=plan.files, note=note,
    )  # fmt: skip
    choice = measured.choose(gradient_bytes=gradient_bytes, bucket_bytes=plan.bucket_bytes, overlap=overlap)
    algorithm, wire = choice.candidate
    return Reduction(
        reducer=maker.make(Algorithm(algorithm), wire=wire), wire=wire, bucket_bytes=choice.bucket_bytes,
        overlap=overlap, oversubscribed=oversubscribed, record={**choice.record(), "overlap": overlap},
        is_measured=True, alternatives=tuple(alternatives), maker=maker, asked_bucket_bytes=plan.bucket_bytes,
        note=note,
    )  # fmt: skip


def _candidates(plan: ReductionRequest, maker: ReducerMaker) -> list[Candidate]:
    wires = AUTO_WIRES if plan.wire == AUTO else (plan.wire,)
    if plan.algorithm != AUTO:
        return [Candidate(plan.algorithm, wire) for wire in wires]
    # Sparse wire formats have one algorithm.
    return [
        Candidate(algorithm, wire)
        for wire in wires
        for algorithm in (
            maker.candidates(wire=wire) if encodes_every_value(wire) else [Algorithm.FLAT.value]
        )
    ]


def gradient_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of one rank's gradient buckets. Half-precision gradients are summed in float32."""
    return sum(p.numel() * max(4, p.dtype.itemsize) for p in model.parameters() if p.requires_grad)


def check_for_layouts(
    optimizer: torch.optim.Optimizer, layouts: Sequence[Layout], *, model: torch.nn.Module
) -> None:
    """Raises UsageError if the optimizer cannot step a model that is split as `layouts` says. Not collective."""
    for layout in layouts or ("none",):
        check_optimizer(optimizer, layout=layout, model=model)


def layouts_of(model: torch.nn.Module, *, num_ranks: int) -> list[Layout]:
    """Returns the ways in which `model` is split over the ranks; [] if each rank has a whole copy."""
    shard, found = shard_of(model), list[Layout]()
    if split_of(model) is not None:
        found.append("tensor")
    if pipeline_of(model) is not None:
        found.append("stages")
    if shard in ("optimizer", "gradients") and num_ranks > 1:
        found.append(shard)
    if shard == "parameters" and is_sharded(model):
        found.append(shard)
    return found
