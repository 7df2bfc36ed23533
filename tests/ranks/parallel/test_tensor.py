"""Layers that are split over tensor groups train as whole ones do on one rank, and any layout continues any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks.parallel.layouts import (
    RELATIVE,
    ContinuedTests,
    Found,
    LayoutTests,
    OverflowTests,
    pack_tokens as pack,
)
from tests.ranks.parallel.tensor_cases import FAMILY
from tests.run_files import records_of

__all__ = ["FAMILY", "pack"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches


class TestLayouts(LayoutTests, ContinuedTests, OverflowTests):
    pass


def test_each_rank_drops_its_part_of_what_one_rank_drops(launches: dict[int, list[Found]]) -> None:
    whole = launches[1][0]["drops"]
    assert whole["steps"] != launches[1][0]["none"]["steps"]
    for found in launches[2]:
        np.testing.assert_allclose(found["drops"]["steps"], whole["steps"], rtol=RELATIVE)
        assert found["drops"]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)


def test_between_split_layers_a_rank_has_its_part_of_the_sequence(
    launches: dict[int, list[Found]],
) -> None:
    for found in launches[2]:
        parts = found["parts"]
        assert parts["shapes"] == {name: [3, 2, 8] for name in ("blocks.0", "blocks.1", "norm", "head")}
        assert parts["logits"] == [3, 4, 10]
        assert parts["trained"] == [True, False]
        # Of two blocks, each with two pairs of layers, in forward and backward; and the logits.
        assert parts["sent"] == {"all_gather_into_tensor": 9, "reduce_scatter_tensor": 8}
        assert (
            "a sequence of 3 positions cannot be split into 2 equal parts. Use sequences of 2"
            in parts["refused"]
        )


def test_samples_are_counted_once(launches: dict[int, list[Found]], directory: Path) -> None:
    records = [records_of(directory / "4-by node", rank=rank) for rank in range(4)]
    samples = [sum(rank[step]["samples"] for rank in records) for step in range(6)]
    assert samples == [12, 12, 12, 12, 12, 1]
    assert [step["global_samples"] for step in records[3][:6]] == [12, 24, 36, 48, 60, 61]


def test_a_step_that_is_given_up_leaves_nothing_behind(launches: dict[int, list[Found]]) -> None:
    for found in (launch["abandoned"] for launch in launches[4]):
        after, first = found["norms"]
        assert after == pytest.approx(first, rel=RELATIVE)
        assert len(found["refused"]) == 2
        assert all("backward ran twice before step()" in text for text in found["refused"])


def test_gradients_that_step_has_yet_to_sum_refuse_every_use(
    launches: dict[int, list[Found]],
) -> None:
    for found in (launch["hidden"] for launch in launches[4]):
        uses = [
            "clip_grad_norm_",
            "clip_grad_value_",
            "clone",
            "numpy",
            "data",
            "optimizer",
            "synchronize",
            "replaced",
        ]
        names = {f"{use}, {how}" for use in uses for how in ("plain", "last")}
        assert found["raised"].keys() == names | {"clone, create_graph", "dropped, last"}
        for name, text in found["raised"].items():
            assert "a rank has those of its own samples and layers alone" in text, name
            assert text.startswith("UsageError" if "synchronize" in name else "GradientsInUse"), name
        # Hiding them changes nothing: of two backwards step has the sum.
        assert found["norms"].pop("seen in no_sync") == 1.0
        assert len(found["norms"]) == 9
        first = found["norms"]["plain"]
        assert found["norms"] == pytest.approx(dict.fromkeys(found["norms"], first), rel=RELATIVE)


def test_an_own_loop_trains_on_the_data_axis(launches: dict[int, list[Found]]) -> None:
    whole = launches[1][0]["own loop"]
    for found in launches[2]:
        np.testing.assert_allclose(found["own loop"]["steps"], whole["steps"], rtol=RELATIVE)
    for found in (*launches[2], *launches[4]):
        assert found["own loop"]["alike"]
    # Four ranks went on from what two had saved: of a tensor group both draw the same numbers.
    drawn = launches[4][0]["own loop"]["drawn"]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert launches[4][0]["own loop"]["steps"][0][0] < whole["steps"][0][0]
