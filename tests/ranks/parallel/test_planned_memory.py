"""What `hpctrain plan` predicts is what ranks use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.run import parse_recipe, plan_memory
from tests.ranks.parallel import memory_cases
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("memory")
    x = np.random.default_rng(0).normal(size=(2048, memory_cases.FEATURES)).astype(np.float32)
    pack_arrays(where / "data", {"x": x, "label": (x.sum(1) > 0).astype(np.int64)})
    return where


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_memory_grows_as_planned(directory: Path, shard: str) -> None:
    given = {} if shard == "none" else {"shard": shard}
    recipe = parse_recipe(memory_cases.document(str(directory), "plan", given))
    plan = plan_memory(recipe, recipe_path=directory / "recipe.toml", num_ranks=2, ranks_per_node=1)
    assert plan.model.num_elements == pytest.approx(19e6, rel=0.05)
    (needs,) = (way.needs for way in plan.ways if way.name == shard)
    assert needs is not None
    grown = run_ranks(2, memory_cases.growth, str(directory), shard, given, timeout_s=800).outputs
    for bytes_grown in grown:
        assert needs.total(plan.run.micro_batch) == pytest.approx(bytes_grown, rel=0.1), (needs, grown)
