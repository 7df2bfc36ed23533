"""What real ranks do in the tests of the choice by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.autotune.link_speed import Candidate
from hpctrain.reduce.autotune.tune import CalibrationFiles, find_choice
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.topology import Topology

CPU = torch.device("cpu")
NUMELS = (3, 1_000, 30_000, 700_000, 250_000)


def choose_and_sum(world: World, directory: str, nodes: list[str]) -> dict[str, Any]:
    """Measure, take what was measured a second time from the file, and sum buckets of many sizes by it."""
    topology = Topology.from_node_names(nodes, emulated=True)
    maker = ReducerMaker(world, topology=topology)

    def make(algorithm: str, wire: str) -> BucketReducer:
        return maker.make(Algorithm(algorithm), wire=wire)

    candidates = [Candidate(name, wire) for wire in ("fp32", "fp16") for name in maker.candidates(wire=wire)]
    notes: list[str] = []
    found = [
        find_choice(
            world, make=make, candidates=candidates, topology=topology, device=CPU,
            files=CalibrationFiles(run=Path(directory) / "reduction.json"), note=notes.append,
        )
        for _ in range(2)
    ]  # fmt: skip
    auto = found[1].choose(gradient_bytes=4 * sum(NUMELS), bucket_bytes=1_000_000)
    reducer = make(*auto.candidate)
    buckets = plan_buckets([GradientSpec(n, torch.float32) for n in NUMELS], bucket_bytes=1)
    right: list[bool] = []
    for _ in range(2):  # as training does: a second plan, in another order
        memory = reducer.plan(buckets, device=CPU)
        for tensor in memory:
            tensor.copy_(torch.arange(tensor.numel()) % 16 + world.rank)
        for reduction in [reducer.reduce(number) for number in range(len(buckets))]:
            for _ in reduction:
                pass
        for tensor in memory:
            # Whole numbers below 2048: float16 holds them exactly.
            expected = (torch.arange(tensor.numel()) % 16) * world.num_ranks + sum(range(world.num_ranks))
            right.append(torch.equal(tensor, expected.float()))
        buckets = buckets[::-1]
    reducer.close()
    return {
        "sums right": right,
        "same from the file": found[0].choice == found[1].choice and found[0].levels == found[1].levels,
        "sources": [one.source for one in found],
        "record": auto.record(),
        "levels": [level.axis for level in found[0].levels],
        "notes": notes,
    }
