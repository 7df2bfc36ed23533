"""hpctrain's reductions as methods of the benchmark: one bucket through a `BucketReducer`, on the thread that reduces
in a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.reduction.peers import Family, Method
from hpctrain.errors import UsageError
from hpctrain.reduce.algorithms import AUTO, Algorithm
from hpctrain.reduce.autotune.tune import CalibrationFiles
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.run import Session
from hpctrain.run.reduction import ReductionPlan

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8}
CPU = torch.device("cpu")


def our_family(session: Session, *, choices: Sequence[tuple[str, str]]) -> Family:
    """Returns hpctrain's methods. choices: pairs of algorithm and wire, by their names in the recipe."""

    def methods(numel: int) -> list[Method]:
        return [
            our_method(session, numel=numel, algorithm=algorithm, wire=wire) for algorithm, wire in choices
        ]

    return Family(name="ours", methods=methods)


def name_of(algorithm: str, wire: str) -> str:
    return f"{algorithm}/{wire}"


def our_method(
    session: Session, *, numel: int, algorithm: str, wire: str, calibration: Path | None = None
) -> Method:
    """Returns a method of hpctrain. Collective. Gradients are in the bucket's memory, where backward writes them.

    calibration: file in which `auto` stores its measurement, as a run does in its directory.
    """
    buckets = plan_buckets([GradientSpec(numel, torch.float32)], bucket_bytes=max(1, 4 * numel))
    auto = algorithm == AUTO
    if auto:
        reducer = _auto(session, num_bytes=4 * numel, wire=wire, calibration=calibration)
    else:
        reducer = _fixed(session, algorithm=algorithm, wire=wire)
    memory = reducer.plan(buckets, device=CPU)
    overlap = session.reductions.overlap(spare_core=session.reductions.has_spare_core())
    pipeline = ReductionPipeline(reducer.reduce, device=CPU, overlap=overlap)

    def fill(values: torch.Tensor) -> None:
        memory[0].zero_()
        memory[0][:numel].copy_(values)

    def reduce() -> None:
        pipeline.submit(0)
        pipeline.wait()

    def close() -> None:
        pipeline.close()
        memory.clear()
        if not auto:  # that one is the session's
            reducer.close()

    return Method(
        name=name_of(algorithm, wire), bits=BITS.get(wire, 0), fill=fill, reduce=reduce,
        result=lambda: memory[0][:numel], close=close, averages=False,
        runs=f"{reducer.algorithm}, {reducer.wire}",
    )  # fmt: skip


def available(session: Session, choices: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the choices that run here without being replaced by another algorithm. Collective."""
    maker = ReducerMaker(session.world, topology=session.topology)
    return [(name, wire) for name, wire in choices if name == AUTO or name in maker.candidates(wire=wire)]


def _auto(session: Session, *, num_bytes: int, wire: str, calibration: Path | None) -> BucketReducer:
    plan = ReductionPlan(
        algorithm=AUTO, wire=wire, bucket_bytes=max(1, num_bytes), files=CalibrationFiles(run=calibration)
    )
    return session.reductions.make(plan, gradient_bytes=num_bytes, computes=False).reducer


def _fixed(session: Session, *, algorithm: str, wire: str) -> BucketReducer:
    maker = ReducerMaker(session.world, topology=session.topology)
    if algorithm not in maker.candidates(wire=wire):
        raise UsageError(
            f"{algorithm} with {wire} would be replaced by another algorithm here: pass only choices from `available`"
        )
    return maker.make(Algorithm(algorithm), wire=wire)
