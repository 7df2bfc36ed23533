"""A loss that is a mean over tokens, with weights: any ranks, micro-batches and layout train as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks.parallel.layouts import RELATIVE, Found, LayoutTests, numbers
from tests.ranks.parallel.loss_weight_cases import FAMILY, OF_SAMPLES, RESUMED, WIRES

__all__ = ["FAMILY"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches

Launches = dict[int, list[Found]]


def pack(where: Path) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 17, (37, 13)).astype(np.int64)  # the last batch of an epoch has one sample
    tokens[:, 1::2] = tokens[:, ::2][:, :6]
    lengths = random.integers(1, 13, 37) * (random.random(37) < 0.6)
    pack_arrays(where / "data", {"tokens": tokens, "length": lengths.astype(np.int64)})


class TestLayouts(LayoutTests):
    pass


@pytest.mark.parametrize("run", ["none", "padded"])
def test_most_batches_have_a_token(launches: Launches, run: str) -> None:
    losses, _, applied = np.transpose(numbers(launches[1][0][run]))
    assert len(losses) == 20
    assert np.isfinite(losses).all()
    assert sum(applied) >= 15  # the last batch of an epoch is one sample, perhaps without a token


def test_a_padded_batch_trains_as_on_one_rank(launches: Launches) -> None:
    alone = launches[1][0]["padded"]
    for found in (output["padded"] for output in launches[3]):
        np.testing.assert_allclose(numbers(found), numbers(alone), rtol=RELATIVE)
        assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=RELATIVE)


def test_the_size_of_the_weights_changes_no_bit(launches: Launches) -> None:
    assert launches[1][0]["large"]["steps"] == launches[1][0]["none"]["steps"]


@pytest.mark.parametrize("wire", [wire for wire, kinds in WIRES[2].items() if OF_SAMPLES[0] in kinds])
def test_with_a_wire_format_equal_weights_are_as_none(launches: Launches, wire: str) -> None:
    weighed, plain = (numbers(launches[2][0]["wires"][wire][kind]) for kind in OF_SAMPLES)
    # In int8 and the sparse formats nothing depends on the size of a gradient; 16 bits round at other values.
    np.testing.assert_allclose(weighed, plain, rtol=5e-3 if wire == "fp16" else 1e-9)


@pytest.mark.parametrize(
    ("ranks", "wire"), [(n, wire) for n in WIRES for wire in WIRES[n] if wire in ("fp16", "bf16", "int8")]
)
def test_a_wire_format_trains_as_one_process_within_its_rounding(
    launches: Launches, ranks: int, wire: str
) -> None:
    alone = launches[1][0]["none"]
    losses = [step[0] for step in numbers(alone)]
    for output in launches[ranks]:
        found = output["wires"][wire]["pair"]
        np.testing.assert_allclose([step[0] for step in numbers(found)], losses, rtol=2e-3)
        assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=2e-3)


@pytest.mark.parametrize(
    ("ranks", "kind"), [(n, kind) for n in WIRES for kind in WIRES[n].get("low-rank", ())]
)
def test_factors_of_full_rank_train_as_one_process(launches: Launches, ranks: int, kind: str) -> None:
    """The matrices have at most 8 columns or rows, and the factors 16: the reduction is exact."""
    alone = numbers(launches[1][0]["longer"])
    for output in launches[ranks]:
        found = output["wires"]["low-rank"][kind]
        assert len(found["steps"]) == len(alone) == 3  # the last ones, in which factors are sent
        np.testing.assert_allclose(numbers(found), alone, rtol=1e-7)


@pytest.mark.parametrize(
    ("ranks", "wire", "kind"),
    [
        (n, w, kind)
        for n in WIRES
        for w in WIRES[n]
        for kind in WIRES[n][w]
        if kind.startswith("uneven") and kind.removeprefix("uneven ") in WIRES[n][w]
    ],
)
def test_what_is_fed_back_does_not_depend_on_the_size_of_the_weights(
    launches: Launches, ranks: int, wire: str, kind: str
) -> None:
    for output in launches[ranks]:
        found = output["wires"][wire]
        assert found[kind]["steps"] == found[kind.removeprefix("uneven ")]["steps"]


@pytest.mark.parametrize("wire", RESUMED)
def test_resumed_runs_continue_to_the_bit(launches: Launches, wire: str) -> None:
    for output in launches[2]:
        found = output["wires"][wire]
        assert len(found["whole later"]["steps"]) == 3
        assert found["pair later"]["steps"] == found["whole later"]["steps"]
        assert found["pair later"]["evaluation"] == found["whole later"]["evaluation"]


def test_batch_norm_with_ranks_that_count_nothing(launches: Launches) -> None:
    alone = launches[1][0]["norm"]
    assert 5 <= sum(step[2] for step in alone["steps"]) < 20
    for found in launches[2]:
        np.testing.assert_allclose(numbers(found["norm"]), numbers(alone), rtol=RELATIVE)
        assert found["norm"]["evaluation"] == pytest.approx(alone["evaluation"], rel=RELATIVE)
        of_plain = numbers(found["plain norm"])
        assert [step[2] for step in of_plain] == [step[2] for step in numbers(alone)]
        assert np.isfinite([step[0] for step in of_plain]).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixture", "USAGE step 1: the task's loss returns a weight on rank 1 and none on rank 0"),
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
