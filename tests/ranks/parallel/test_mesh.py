"""A language model on the mesh pipeline x node x local x tensor trains as on one rank, in every factorisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks.parallel import mesh_cases
from tests.ranks.parallel.layouts import LATER, RELATIVE, STEPS, pack_tokens, saved_states
from tests.ranks.parallel.mesh_cases import ALONE, CONTINUED, LAYOUTS
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(3600)]  # a fixture makes all launches


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("mesh")
    pack_tokens(where)
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks what each rank found; each launch continues what those before it have saved."""
    launches = {n: run_ranks(n, mesh_cases.trained, str(directory), timeout_s=800).outputs for n in CONTINUED}
    for n, name in ALONE:
        alone = run_ranks(n, mesh_cases.trained_alone, str(directory), name, timeout_s=800).outputs
        for of_rank, of_alone in zip(launches[n], alone, strict=True):
            of_rank |= of_alone
    return launches


@pytest.mark.parametrize(("ranks", "layout"), [(n, name) for n in LAYOUTS for name in LAYOUTS[n]])
def test_every_factorisation_trains_as_one_rank(
    launches: dict[int, list[dict[str, Any]]], directory: Path, ranks: int, layout: str
) -> None:
    whole = launches[1][0]["none"]
    for found in launches[ranks]:
        assert found[layout]["status"] == "finished"
        assert len(found[layout]["steps"]) == STEPS
        np.testing.assert_allclose(found[layout]["steps"], whole["steps"], rtol=RELATIVE)
        assert found[layout]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)
    if all(name != f"{ranks}-{layout}" for entries in CONTINUED.values() for name, _ in entries):
        expected = saved_states(directory, "1-reference")[0]
        found_state = saved_states(directory, f"{ranks}-{layout}")[0]
        assert found_state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize(("ranks", "name"), [(n, entry[0]) for n in CONTINUED for entry in CONTINUED[n]])
def test_any_layout_continues_any_other(
    launches: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    whole = launches[1][0]["later"]["steps"]
    assert len(whole) == LATER - STEPS
    for found in launches[ranks]:
        continued = found[f"{name} continued"]
        np.testing.assert_allclose(continued["steps"], whole, rtol=RELATIVE)
        assert continued["steps"][0][0] == pytest.approx(whole[0][0], rel=1e-12)
