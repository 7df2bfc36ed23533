"""Low-rank and top-k reduction among real processes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.reduce.low_rank import LowRankReducer
from hpctrain.reduce.reducer import BucketReducer
from hpctrain.reduce.top_k import TopKReducer
from tests.unit.bucket_steps import CPU, Steps, buckets_of, in_gradient_space, random_gradients


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
