"""A loss that is a mean over tokens, with weights: any ranks, micro-batches and layout train as one process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks.parallel import loss_weight_cases
from tests.ranks.parallel.loss_weight_cases import LAYOUTS
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches

RELATIVE = 1e-10
Launches = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    where = tmp_path_factory.mktemp("loss-weights")
    random = np.random.default_rng(0)
    tokens = random.integers(0, 17, (37, 13)).astype(np.int64)  # the last batch of an epoch has one sample
    tokens[:, 1::2] = tokens[:, ::2][:, :6]
    lengths = random.integers(1, 13, 37) * (random.random(37) < 0.6)
    pack_arrays(where / "data", {"tokens": tokens, "length": lengths.astype(np.int64)})
    return {n: run_ranks(n, loss_weight_cases.everything, str(where)).outputs for n in LAYOUTS}


def numbers(found: dict[str, Any]) -> list[list[float]]:
    """Loss, norm and whether it was applied, of each step; the norm of a skipped one is NaN, recorded as text."""
    return [[float(value) for value in step] for step in found["steps"]]


@pytest.mark.parametrize(("ranks", "layout"), [(n, name) for n in LAYOUTS for name in LAYOUTS[n]])
def test_any_layout_trains_as_one_process(launches: Launches, ranks: int, layout: str) -> None:
    alone = launches[1][0]["padded" if layout == "padded" else "none"]
    assert len(alone["steps"]) == 20
    losses, applied = [step[0] for step in alone["steps"]], [step[2] for step in alone["steps"]]
    assert np.isfinite(losses).all()
    assert sum(applied) >= 15  # the last batch of an epoch is one sample, perhaps without a token
    for found in launches[ranks]:
        np.testing.assert_allclose(numbers(found[layout]), numbers(alone), rtol=RELATIVE)
        assert found[layout]["evaluation"] == pytest.approx(alone["evaluation"], rel=RELATIVE)


def test_the_size_of_the_weights_changes_no_bit(launches: Launches) -> None:
    assert launches[1][0]["large"]["steps"] == launches[1][0]["none"]["steps"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixture", "USAGE the task's loss returns a weight on rank 1 and none on rank 0"),
        ("nan", "gave the weight nan: give a finite number of 0 or more"),
        ("negative", "gave the weight -1: give a finite number of 0 or more"),
        ("bool", "gave the weight True: give a number or a tensor"),
        ("shape", "gave a weight of shape [2]"),
        ("text", "gave the weight '12': give a number"),
    ],
)
def test_what_is_no_weight_is_refused_on_all_ranks(launches: Launches, name: str, words: str) -> None:
    for found in launches[2]:
        assert words in found[name], found[name]


def test_steps_in_which_nothing_counts_are_skipped(launches: Launches) -> None:
    for found in launches[2]:
        assert [step[0] for step in found["nothing"]["steps"]] == [0.0] * 20
        assert not any(step[2] for step in found["nothing"]["steps"])
