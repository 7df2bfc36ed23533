"""Keys of [reduction] beside sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import RecipeError
from hpctrain.run import Recipe, parse_recipe


def recipe(reduction: dict[str, Any], **parallel: str) -> Recipe:
    return parse_recipe({
        "run": {"directory": "runs/x", "steps": 1},
        "task": {"target": "module:Task"},
        "data": {"train": "data", "global_batch": 4},
        "reduction": reduction,
        "parallel": {"shard": "parameters", **parallel},
    })  # fmt: skip


def test_algorithm_and_wire_of_sharded_gradients() -> None:
    for algorithm in ("auto", "direct", "hierarchical"):
        for wire in ("fp32", "fp16", "bf16", "int8"):
            assert recipe({"algorithm": algorithm, "wire": wire}).reduction.wire == wire
    assert recipe({"algorithm": "hierarchical"}, shard_within="node").parallel.shard_within == "node"


@pytest.mark.parametrize(
    ("reduction", "parallel", "message"),
    [
        ({"algorithm": "ring"}, {}, "reduction.algorithm = 'ring'.*choose one of auto, direct, hierarchical"),
        ({"wire": "top-k"}, {}, "reduction.wire = 'top-k'.*choose one of fp32, fp16, bf16, int8"),
        ({"wire": "auto"}, {}, "reduction.wire = 'auto'"),
        (
            {"bucket_mb": 4.0, "sync_batch_norm": True},
            {},
            r"reduction\.bucket_mb, reduction\.sync_batch_norm",
        ),
        ({"algorithm": "direct"}, {"shard_within": "node"}, "sums within each node first"),
    ],
)
def test_what_fsdp_cannot_follow_is_refused(
    reduction: dict[str, Any], parallel: dict[str, str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(reduction, **parallel)
