"""Recipes with `reduction.schedule.method = "adasum"`: what is refused when the recipe is read."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import RecipeError
from hpctrain.reduce import Adasum
from hpctrain.run import parse_recipe
from hpctrain.run.build import reduction_plan


def recipe(reduction: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "adasum", "directory": "run", "steps": 3},
        "task": {"target": "hpctrain.tasks.digits:Digits"},
        "data": {"train": "data", "global_batch": 8},
        "reduction": {"schedule": {"method": "adasum"}, **reduction},
        **sections,
    }


def test_the_reduction_is_adasum() -> None:
    for within_node in ("adasum", "mean"):
        table = {"schedule": {"method": "adasum", "within_node": within_node}}
        assert reduction_plan(parse_recipe(recipe(table))).adasum == Adasum(within_node=within_node)


@pytest.mark.parametrize(
    ("reduction", "sections", "message"),
    [
        ({"wire": "fp16"}, {}, "reduction.wire = 'fp16'"),
        ({"algorithm": "ring"}, {}, "reduction.algorithm = 'ring'"),
        ({}, {"parallel": {"shard": "optimizer"}}, "parallel.shard = 'optimizer'"),
        ({}, {"parallel": {"shard": "parameters"}}, "parallel.shard = 'parameters'"),
        ({}, {"parallel": {"tensor": 2}}, "parallel.tensor = 2"),
        ({"schedule": {"method": "adasum", "within_node": "sum"}}, {}, "should be 'adasum' or 'mean'"),
        ({"schedule": {"method": "adasum", "every": 5}}, {}, "every"),
        ({"schedule": {"method": "ssp", "staleness": 3}}, {}, "input tag 'ssp'"),
    ],
)
def test_what_does_not_compose_is_refused(
    reduction: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe(reduction, **sections))
    assert message in str(caught.value)


def test_batch_norm_over_the_ranks_accumulation_clipping_and_fp16_compose() -> None:
    parse_recipe(
        recipe(
            {"sync_batch_norm": True},
            optimizer={"clip_norm": 1.0, "ema": 0.9},
            run={"name": "adasum", "directory": "run", "steps": 3, "precision": "fp16"},
            data={"train": "data", "global_batch": 8, "micro_batches": 2},
        )
    )
