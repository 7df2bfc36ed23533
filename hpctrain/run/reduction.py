"""What a run reduces with: by the names in the recipe, or by measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.reduce.algorithms import (
    AUTO,
    LIBRARY_ALGORITHMS,
    SPARSE_WIRES,
    Algorithm,
    check_wire,
    parse_algorithm,
)
from hpctrain.reduce.autotune.cost_model import Candidate
from hpctrain.reduce.autotune.decision import DEFAULT_BUCKET_BYTES
from hpctrain.reduce.autotune.tune import CalibrationFiles, find_choice
from hpctrain.reduce.autotune.tuned_reducer import AutoReducer
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.topology import Topology

# What `wire = "auto"` chooses among: nothing that loses more than one rounding of a gradient.
AUTO_WIRES = ("fp32", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPlan:
    """What is asked for. bucket_bytes: None to choose. files: where measurements are kept between runs."""

    algorithm: str = AUTO
    wire: str = "fp32"
    bucket_bytes: int | None = None
    files: CalibrationFiles = field(default_factory=CalibrationFiles)

    def __post_init__(self) -> None:
        """UsageError for a name that does not exist."""
        if self.algorithm != AUTO:
            parse_algorithm(self.algorithm)
        check_wire(self.wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What it came to. overlap: reduce beside backward. record: the choice and its numbers, for the run's record."""

    reducer: BucketReducer
    wire: str
    bucket_bytes: int
    overlap: bool
    record: dict[str, Any]

    @property
    def algorithm(self) -> str:
        return self.reducer.algorithm

    @property
    def by_library(self) -> bool:
        """Whether buckets of some size are reduced by the operations of the run's reduction backend."""
        ranges = self.record.get("ranges", [])
        names = {entry["algorithm"] for entry in ranges} or {self.algorithm}
        return any(algorithm.value in names for algorithm in LIBRARY_ALGORITHMS)


def make_reduction(
    world: World,
    plan: ReductionPlan,
    *,
    topology: Topology,
    device: torch.device,
    gradient_bytes: int,
    overlap: bool = True,
    nccl: Algorithm | None = None,
    note: Callable[[str], None],
) -> Reduction:
    """The reducer that `plan` asks for, or the one that runs instead, which `note` is told. Collective.

    gradient_bytes: of all the gradients of one rank. With `auto`, a measurement of at most two seconds, unless a
    file has one. overlap: whether reductions are to run beside backward. nccl: what Horovod's NCCL was set to.
    """
    maker = ReducerMaker(
        world, topology=topology, device=device.type, gradient_bytes=gradient_bytes, nccl=nccl, note=note
    )
    if AUTO not in (plan.algorithm, plan.wire):
        reducer = maker.make(parse_algorithm(plan.algorithm), wire=plan.wire)
        bucket_bytes = plan.bucket_bytes or DEFAULT_BUCKET_BYTES
        record = {
            "source": "as asked for",
            "wire": plan.wire,
            "bucket_bytes": bucket_bytes,
            "overlap": overlap,
        }
        return Reduction(
            reducer=reducer, wire=plan.wire, bucket_bytes=bucket_bytes, overlap=overlap, record=record
        )
    measured = find_choice(
        world, make=lambda algorithm, wire: maker.make(Algorithm(algorithm), wire=wire),
        candidates=_candidates(plan, maker), topology=topology, device=device, files=plan.files, note=note,
    )  # fmt: skip
    choice = measured.settle(gradient_bytes=gradient_bytes, bucket_bytes=plan.bucket_bytes, overlap=overlap)
    auto = AutoReducer(
        choice, comm=world.duplicate(),
        make=lambda algorithm, wire: maker.make(Algorithm(algorithm), wire=wire),
    )  # fmt: skip
    return Reduction(
        reducer=auto, wire=choice.wire, bucket_bytes=choice.bucket_bytes, overlap=overlap,
        record={**choice.record(), "overlap": overlap},
    )  # fmt: skip


def _candidates(plan: ReductionPlan, maker: ReducerMaker) -> list[Candidate]:
    wires = AUTO_WIRES if plan.wire == AUTO else (plan.wire,)
    if plan.algorithm != AUTO:
        return [Candidate(plan.algorithm, wire) for wire in wires]
    # A sparse wire has one way to go.
    return [
        Candidate(algorithm, wire)
        for wire in wires
        for algorithm in ([Algorithm.FLAT.value] if wire in SPARSE_WIRES else maker.candidates(wire=wire))
    ]


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of the buckets of one rank: half-precision gradients are summed in float32."""
    return sum(p.numel() * max(4, p.dtype.itemsize) for p in model.parameters() if p.requires_grad)
