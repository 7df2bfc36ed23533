"""Low-rank and top-k reduction among real processes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hpctrain.comm import World, all_gather_json
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.collective_reducers.power_sgd import LowRankReducer
from hpctrain.reduce.collective_reducers.top_k import TopKReducer
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.wire_formats import SPARSE_WIRES
from hpctrain.topology import Topology
from tests.unit.reduce.bucket_steps import (
    CPU,
    Steps,
    buckets_of,
    in_gradient_space,
    random_gradients,
    true_sums,
)

# The first and the third are matrices that rank 16 makes smaller, the others are sent as they are.
SHAPES = ((96, 80), (80,), (64, 8, 12), (40, 30))
WHOLE_STEPS = 20  # of both, unless told otherwise
STEPS = WHOLE_STEPS + 4


def both(world: World) -> dict[str, Any]:
    return {"bits": sums_of_both(world), "made": made_as_in_a_run(world)}


def made_as_in_a_run(world: World) -> dict[str, Any]:
    """By wire, of what the maker makes on two nodes: errors against sums in float64, and what the sums are made of.

    Errors are over the largest magnitude of the true sum: of the steps that are sent whole, and of all that was
    delivered with what every rank keeps back. values: of the last step's sum of the first bucket that are not 0;
    ranks: of its matrices.
    """
    maker = ReducerMaker(world, topology=Topology.from_node_names(["a", "a", "b"]))
    found = {}
    for wire in SPARSE_WIRES:
        reducer = maker.make(Algorithm.HIERARCHICAL, wire=wire)
        buckets = buckets_of(SHAPES, dtype=torch.float64, bucket_bytes=100_000)
        gradients = random_gradients(shapes=SHAPES, dtype=torch.float64)
        steps = Steps(reducer, buckets, world.rank, reducer.plan(buckets, device=CPU))
        steps.run(gradients, count=WHOLE_STEPS)
        whole_bytes = reducer.bytes_sent()
        steps.run(gradients, first=WHOLE_STEPS, count=STEPS - WHOLE_STEPS)
        sums = torch.stack([in_gradient_space(outputs) for outputs in steps.outputs])
        true = [
            in_gradient_space(true_sums(gradients, num_ranks=world.num_ranks, count=count))
            for count in (WHOLE_STEPS, STEPS)
        ]
        left = steps.state()["residual"].tensor[0].clone()
        world.all_reduce(left)
        last = {slot.parameter: steps.outputs[-1][slot.parameter] for slot in buckets[0].slots}
        matrices = [steps.outputs[-1][p].view(SHAPES[p][0], -1) for p in (0, 2)]
        found[wire] = {
            "ran": reducer.algorithm,
            "whole": float((sums[:WHOLE_STEPS].sum(0) - true[0]).abs().max() / true[0].abs().max()),
            "with_kept": float((sums.sum(0) + left - true[1]).abs().max() / true[1].abs().max()),
            "kept": float(left.norm() / true[1].norm()),
            "values": int(in_gradient_space(last).count_nonzero()),
            "of_values": buckets[0].num_gradients,
            "ranks": [int(torch.linalg.matrix_rank(matrix)) for matrix in matrices],
            "whole_bytes": all_gather_json(world, whole_bytes / WHOLE_STEPS),
            "bytes": all_gather_json(world, (reducer.bytes_sent() - whole_bytes) / (STEPS - WHOLE_STEPS)),
        }
        reducer.close()
    return found


def sums_of_both(world: World) -> dict[str, Any]:
    """A fingerprint of the bits of four steps' sums, and the sums' 2-norm."""
    comm = world.duplicate()
    reducers: dict[str, BucketReducer] = {
        "low-rank": LowRankReducer(comm, rank=2, start_step=1),
        "top-k": TopKReducer(comm, fraction=0.1, start_step=1),
        "top-k fp16": TopKReducer(comm, fraction=0.1, value_dtype=torch.float16, start_step=1),
    }
    found: dict[str, Any] = {}
    for name, reducer in reducers.items():
        steps = Steps(reducer, buckets_of(), world.rank, reducer.plan(buckets_of(), device=CPU))
        steps.run(random_gradients(), count=4)
        sums = torch.stack([in_gradient_space(outputs) for outputs in steps.outputs])
        bits = hashlib.sha256(bytes(sums.numpy().tobytes())).hexdigest()
        found[name] = {"bits": bits, "norm": float(sums.double().norm())}
        reducer.close()
    return found
