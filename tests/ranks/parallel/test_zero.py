"""Sharded optimizers and gradients: the bits of plain data parallel, one rank's numbers, any layout's checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks.parallel.layouts import (
    LATER,
    STEPS,
    ContinuedTests,
    Found,
    LayoutTests,
    OverflowTests,
    saved_states,
)
from tests.ranks.parallel.zero_cases import FAMILY, INT8_CONTINUED

__all__ = ["FAMILY"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches


class TestLayouts(LayoutTests, ContinuedTests, OverflowTests):
    pass


@pytest.mark.parametrize("layout", ["optimizer", "gradients"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_same_bits_as_plain_data_parallel(
    launches: dict[int, list[Found]], directory: Path, ranks: int, layout: str
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


@pytest.mark.parametrize(("ranks", "saved"), [(n, run) for n in INT8_CONTINUED for run in INT8_CONTINUED[n]])
def test_error_feedback_goes_on_in_another_layout(
    launches: dict[int, list[Found]], ranks: int, saved: str
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
