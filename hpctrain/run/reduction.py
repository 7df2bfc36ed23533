"""Creates the reducer of a run, by the names in the recipe or by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.comm import Collective, World
from hpctrain.distributed import Shard, is_sharded, pipeline_of, shard_of, split_of
from hpctrain.reduce import (
    AUTO,
    AUTO_WIRES,
    DEFAULT_BUCKET_BYTES,
    LIBRARY_ALGORITHMS,
    Algorithm,
    AllReduceUpdater,
    BucketReducer,
    CalibrationFiles,
    Candidate,
    InBackground,
    Layout,
    LossScale,
    ReducerMaker,
    ScatterReducer,
    ScatterUpdater,
    SparseUpdater,
    check_optimizer,
    check_wire,
    encodes_every_value,
    find_choice,
    parse_algorithm,
    takes_sparse_gradients,
)
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPlan:
    """The requested reduction. `bucket_bytes`: None to choose it. `files`: where measurements are kept between runs."""

    algorithm: str = AUTO
    wire: str = "fp32"
    bucket_bytes: int | None = None
    files: CalibrationFiles = field(default_factory=CalibrationFiles)

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown algorithm or wire format."""
        if self.algorithm != AUTO:
            parse_algorithm(self.algorithm)
        check_wire(self.wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reducer, with how it was chosen. It is a `ScatterReducer` for a sharded optimizer.

    Attributes:
        overlap: Whether it reduces during backward.
        record: The choice and its measurements, as JSON.
        crowded: Whether there are more ranks than cores that they share.
        is_measured: Whether measurements chose the algorithm or the wire format.
    """

    reducer: BucketReducer | ScatterReducer
    wire: str
    bucket_bytes: int
    overlap: bool
    crowded: bool
    record: dict[str, Any]
    is_measured: bool = False

    @property
    def algorithm(self) -> str:
        """The algorithm that runs, with a note if `auto` has chosen it."""
        return f"auto: {self.reducer.algorithm}" if self.is_measured else self.reducer.algorithm

    def updater(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        model: torch.nn.Module,
        loss_scale: LossScale | None,
        clip_norm: float | None,
    ) -> AllReduceUpdater | ScatterUpdater | SparseUpdater:
        """Returns an updater that uses this reducer. Collective.

        An optimizer that takes sparse gradients gets an updater that gathers them instead. comm: the communicator of
        all ranks. model: the model whose parameters the optimizer steps.
        """
        if takes_sparse_gradients(optimizer):
            return SparseUpdater(
                optimizer, comm=comm, loss_scale=loss_scale, clip_norm=clip_norm, model=model
            )
        given: dict[str, Any] = {
            "comm": comm, "bucket_bytes": self.bucket_bytes, "loss_scale": loss_scale, "clip_norm": clip_norm,
            "overlap": self.overlap, "crowded": self.crowded,
        }  # fmt: skip
        if isinstance(self.reducer, ScatterReducer):
            keeps = shard_of(model) != "gradients"
            return ScatterUpdater(
                optimizer, reducer=self.reducer, keeps_gradients=keeps, model=model, **given
            )
        return AllReduceUpdater(optimizer, reducer=self.reducer, model=model, **given)

    @property
    def by_library(self) -> bool:
        """True if the buckets are reduced by the all-reduce of the run's reduction backend."""
        return any(algorithm.value == self.reducer.algorithm for algorithm in LIBRARY_ALGORITHMS)


def make_reduction(
    world: World,
    plan: ReductionPlan,
    *,
    topology: Topology,
    device: torch.device,
    gradient_bytes: int,
    shard: Shard = "none",
    overlap: bool = True,
    spare_core: bool = True,
    crowded: bool = False,
    nccl: Algorithm | None = None,
    note: Callable[[str], None],
) -> Reduction:
    """Creates the reducer that `plan` requests, or the closest possible one, which `note` reports. Collective.

    With `auto`, measures for at most two seconds unless a file has the result.

    Args:
        gradient_bytes: The size of one rank's gradients.
        shard: What is sharded, for a `ScatterUpdater`.
        overlap: Whether reductions run during backward.
        spare_core: Whether each rank has a core that its threads leave free.
        crowded: Whether there are more ranks than cores; `auto` then measures reductions during computation, if they
            overlap.
        nccl: The NCCL algorithm that Horovod uses.
    """
    maker = ReducerMaker(
        world, topology=topology, device=device.type, gradient_bytes=gradient_bytes, nccl=nccl, note=note
    )
    if shard != "none" and world.num_ranks > 1:
        wire = "fp32" if plan.wire == AUTO else plan.wire
        scatter = maker.make_scatter(plan.algorithm, wire=wire)
        bucket_bytes = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
        record = {
            "source": f"parallel.shard = {shard}", "wire": wire, "bucket_bytes": bucket_bytes, "overlap": overlap,
        }  # fmt: skip
        return Reduction(
            reducer=scatter, wire=wire, bucket_bytes=bucket_bytes, overlap=overlap, crowded=crowded, record=record
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
            reducer=reducer, wire=plan.wire, bucket_bytes=bucket_bytes, overlap=overlap, crowded=crowded,
            record=record,
        )  # fmt: skip
    measured = find_choice(
        world, make=lambda algorithm, wire: maker.make(Algorithm(algorithm), wire=wire),
        candidates=_candidates(plan, maker), topology=topology, device=device, files=plan.files, note=note,
        under_load=crowded and overlap and device.type == "cpu",
    )  # fmt: skip
    choice = measured.settle(gradient_bytes=gradient_bytes, bucket_bytes=plan.bucket_bytes, overlap=overlap)
    algorithm, wire = choice.candidate
    return Reduction(
        reducer=maker.make(Algorithm(algorithm), wire=wire), wire=wire, bucket_bytes=choice.bucket_bytes,
        overlap=overlap, crowded=crowded, record={**choice.record(), "overlap": overlap}, is_measured=True,
    )  # fmt: skip


def _candidates(plan: ReductionPlan, maker: ReducerMaker) -> list[Candidate]:
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
    """Raises UsageError if the optimizer cannot step a model that is split in this way. Not collective."""
    for layout in layouts or ("none",):
        check_optimizer(optimizer, layout=layout, model=model)


def layouts_of(model: torch.nn.Module, *, num_ranks: int) -> list[Layout]:
    """Returns how `model` is split over the ranks; [] if each rank has a whole copy."""
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
