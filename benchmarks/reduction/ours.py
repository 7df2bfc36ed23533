"""Ours, as methods of the benchmark: one bucket through a `BucketReducer`, on the reduction thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.reduction.peers import Family, Method
from hpctrain.comm.mpi import open_transport
from hpctrain.reduce.buckets import GradientSpec, plan_buckets
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducer import CollectiveReducer
from hpctrain.reduce.engine import EngineReducer
from hpctrain.reduce.pipeline import ReductionPipeline
from hpctrain.reduce.reducer import BucketReducer
from hpctrain.run import Session
from hpctrain.topology import Topology

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8}
CPU = torch.device("cpu")


def our_family(session: Session, *, choices: Sequence[tuple[str, str]]) -> Family:
    """`choices`: pairs of algorithm and wire, by their names in the recipe."""

    def methods(numel: int) -> list[Method]:
        return [
            our_method(session, numel=numel, algorithm=algorithm, wire=wire) for algorithm, wire in choices
        ]

    return Family(name="ours", methods=methods)


def name_of(algorithm: str, wire: str) -> str:
    return f"{algorithm}/{wire}"


def our_method(session: Session, *, numel: int, algorithm: str, wire: str) -> Method:
    """Collective. The gradients lie in the bucket's memory, where backward puts them."""
    buckets = plan_buckets([GradientSpec(numel, torch.float32)], bucket_bytes=max(1, 4 * numel))
    reducer = _make(session, algorithm=algorithm, wire=wire)
    memory = reducer.plan(buckets, device=CPU)
    pipeline = ReductionPipeline(reducer.reduce, device=CPU)

    def fill(values: torch.Tensor) -> None:
        memory[0].zero_()
        memory[0][:numel].copy_(values)

    def reduce() -> None:
        pipeline.submit(0)
        pipeline.wait()

    def close() -> None:
        pipeline.close()
        memory.clear()
        reducer.close()

    return Method(
        name=name_of(algorithm, wire), bits=BITS.get(wire, 0), fill=fill, reduce=reduce,
        result=lambda: memory[0][:numel], close=close, averages=False,
    )  # fmt: skip


def _make(session: Session, *, algorithm: str, wire: str) -> BucketReducer:
    topology, comm = session.topology, session.world.duplicate()
    if algorithm in ("flat", "hierarchical-flat"):
        return CollectiveReducer.flat(comm, topology=topology, wire=wire)
    alone = Topology(
        tuple((r,) for r in range(topology.num_ranks)), tuple(map(str, range(topology.num_ranks)))
    )
    return EngineReducer(
        open_transport(topology), comm=comm, algorithm=algorithm, codec=codec_named(wire),
        levels=alone if algorithm in ("ring", "direct") else topology,
        exchange="ring" if "ring" in algorithm else "direct", feedback=wire == "int8",
    )  # fmt: skip
