"""Sharded optimizers and gradients: the bits of plain data parallel, one rank's numbers, any layout's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import finished_newest_first, open_checkpoint
from hpctrain.comm import SerialWorld
from tests.fsdp2 import needs_fsdp2
from tests.ranks.parallel import zero_cases
from tests.ranks.parallel.layouts import LATER, RELATIVE, STEPS, pack_rows
from tests.ranks.parallel.zero_cases import CONTINUED, INT8_CONTINUED
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("zero")
    pack_rows(where)
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """One launch for each number of ranks; each continues what others have saved."""
    return {n: run_ranks(n, zero_cases.everything, str(directory), timeout_s=900).outputs for n in CONTINUED}


def saved_states(directory: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """Model and optimizer moments in each checkpoint of a run, whole, the newest first."""
    found = [
        open_checkpoint(path, comm=SerialWorld()).read_all()
        for path in finished_newest_first(directory / name / "checkpoints")
    ]
    return [{n: t for n, t in of.items() if n.startswith(("model/", "optimizer/"))} for of in found]


@pytest.mark.parametrize("layout", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("ranks", CONTINUED)
def test_float64_equals_one_rank(launches: dict[int, list[dict[str, Any]]], ranks: int, layout: str) -> None:
    whole = launches[1][0]["none"]
    for found in launches[ranks]:
        assert found[layout]["status"] == "finished"
        assert len(found[layout]["steps"]) == STEPS
        np.testing.assert_allclose(found[layout]["steps"], whole["steps"], rtol=RELATIVE)
        assert found[layout]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)


@pytest.mark.parametrize("layout", ["optimizer", "gradients"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_same_bits_as_plain_data_parallel(
    launches: dict[int, list[dict[str, Any]]], directory: Path, ranks: int, layout: str
) -> None:
    for found in launches[ranks]:
        losses, expected = ([step[0] for step in found[f"fp32 {name}"]["steps"]] for name in (layout, "none"))
        assert losses == expected
        assert found[f"fp32 {layout}"]["evaluations"] == found["fp32 none"]["evaluations"]
        assert len(found["fp32 none"]["evaluations"]) == 7  # after 3, 6, ... 18 and all 20 steps
    every_plain = saved_states(directory, f"{ranks}-fp32 none")
    assert len(every_plain) == 3  # after 7, 14 and 20 steps
    for sharded, plain in zip(saved_states(directory, f"{ranks}-fp32 {layout}"), every_plain, strict=True):
        assert sharded.keys() == plain.keys()
        assert any(name.endswith("exp_avg_sq") for name in plain)
        for name, tensor in plain.items():
            assert torch.equal(sharded[name], tensor), name


@pytest.mark.parametrize(
    ("ranks", "saved"), [(n, f"{entry[0]}-{entry[1]}") for n in CONTINUED for entry in CONTINUED[n]]
)
def test_any_layout_continues_any_other(
    launches: dict[int, list[dict[str, Any]]], ranks: int, saved: str
) -> None:
    whole = launches[1][0]["later"]["steps"]
    assert len(whole) == LATER - STEPS
    if f"{saved} continued" not in launches[ranks][0]:
        needs_fsdp2()
    for found in launches[ranks]:
        continued = found[f"{saved} continued"]
        np.testing.assert_allclose(continued["steps"], whole, rtol=RELATIVE)
        assert continued["steps"][0][0] == pytest.approx(whole[0][0], rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "saved"), [(n, f"{entry[0]}-{entry[1]}") for n in INT8_CONTINUED for entry in INT8_CONTINUED[n]]
)
def test_error_feedback_goes_on_in_another_layout(
    launches: dict[int, list[dict[str, Any]]], ranks: int, saved: str
) -> None:
    """That no error is lost is in `test_zero_feedback.py`; trajectories in int8 soon differ."""
    whole = launches[1][0]["later"]["steps"]
    for found in launches[ranks]:
        losses = [step[0] for step in found[f"{saved} continued"]["steps"]]
        assert len(losses) == LATER - STEPS
        assert np.isfinite(losses).all()
        # Of a model that was not loaded it would be near 0.7.
        assert losses[0] == pytest.approx(whole[0][0], abs=1e-5)
        assert losses == [step[0] for step in launches[ranks][0][f"{saved} continued"]["steps"]]


def test_a_step_that_overflows_on_the_wire_is_skipped_on_all_ranks_as_without_shards(
    launches: dict[int, list[dict[str, Any]]],
) -> None:
    skipped = {
        name: [[not applied for _, _, applied in found[f"overflow {name}"]["steps"]] for found in launches[2]]
        for name in ("none", "optimizer", "gradients")
    }
    assert any(skipped["none"][0])
    assert not all(skipped["none"][0])
    assert skipped["optimizer"] == skipped["gradients"] == skipped["none"] == [skipped["none"][0]] * 2
