"""Models in a pipeline train as whole ones do on one rank, and any layout continues any other's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.scaling import efficiency_of, read_efficiency, read_step_times
from hpctrain.telemetry import CLOCK_KEYS
from tests.ranks.parallel.layouts import (
    LATER,
    RELATIVE,
    STEPS,
    ContinuedTests,
    Found,
    LayoutTests,
    OverflowTests,
    pack_rows,
)
from tests.ranks.parallel.pipeline_cases import FAMILY, LENGTH
from tests.run_files import records_of

__all__ = ["FAMILY"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(1500)]


def pack(where: Path) -> None:
    pack_rows(where)
    random = np.random.default_rng(1)
    for name, samples, length in (("sequences", 61, LENGTH), ("longer", 17, LENGTH + 3)):
        x = random.normal(size=(samples, length, 3))
        pack_arrays(where / name, {"x": x, "label": (x.sum(2) > 0).astype(np.int64)})


class TestLayouts(LayoutTests, ContinuedTests, OverflowTests):
    pass


def test_ranks_of_a_stage_that_drift_are_found_and_a_dropped_step_leaves_nothing(
    launches: dict[int, list[Found]],
) -> None:
    for found in launches[4]:
        text, mean = found["meddled"]
        assert re.search(
            r"parameters: '0\.0\.bias' between ranks (0.*\d) \(ranks \1 hold the same part\).* Found at step 8",
            text,
        ), text
        assert np.isfinite(mean).all()
    assert any(any(found["meddled"][1]) for found in launches[4])


@pytest.mark.parametrize(("ranks", "name"), [(2, "1f1b"), (4, "shares, interleaved")])
def test_each_rank_begins_with_the_weights_of_its_stages(
    launches: dict[int, list[Found]], ranks: int, name: str
) -> None:
    expected = launches[1][0]["from weights none"]["steps"]
    # Not with those of the seed, nor with the moments of the run whose weights they are.
    assert expected[0][0] != pytest.approx(launches[1][0]["none"]["steps"][0][0], rel=1e-3)
    for found in launches[ranks]:
        np.testing.assert_allclose(found[f"from weights {name}"]["steps"], expected, rtol=RELATIVE)


@pytest.mark.parametrize(
    ("ranks", "name"), [(2, "1f1b"), (2, "zero-bubble"), (4, "of 2, data 2"), (4, "of 2, shards")]
)
def test_samples_may_have_other_shapes_in_each_step_and_in_evaluations(
    launches: dict[int, list[Found]], ranks: int, name: str
) -> None:
    whole = launches[1][0]["of lengths none"]
    assert len(whole["evaluations"]) == STEPS // 4
    for found in launches[ranks]:
        np.testing.assert_allclose(found[f"of lengths {name}"]["steps"], whole["steps"], rtol=RELATIVE)
        np.testing.assert_allclose(
            found[f"of lengths {name}"]["evaluations"], whole["evaluations"], rtol=RELATIVE
        )


def test_tensors_of_several_names_are_saved_and_loaded(launches: dict[int, list[Found]]) -> None:
    whole = launches[1][0]["twice named"]["steps"]
    assert len(whole) == LATER - STEPS
    for found in launches[2]:
        np.testing.assert_allclose(found["twice named"]["steps"], whole, rtol=RELATIVE)


def test_the_bubble_is_a_part_of_the_step_in_records_and_efficiencies(
    launches: dict[int, list[Found]], directory: Path
) -> None:
    for rank in range(2):
        steps = [record["seconds"] for record in records_of(directory / "2-1f1b", rank=rank)]
        assert len(steps) == STEPS
        for seconds in steps:
            assert min(seconds["bubble"], seconds["compute"]) > 0
            assert sum(seconds[part] for part in (*CLOCK_KEYS, "other")) == pytest.approx(
                seconds["step"], rel=1e-9
            )
    measured = read_efficiency(directory / "2-1f1b")
    assert measured.parts["bubble"] > 0
    # The same by the sums over the ranks and by the records of each.
    by_records = efficiency_of(read_step_times(directory / "2-1f1b"))
    assert measured.parts == pytest.approx(by_records.parts, rel=1e-6, abs=1e-9)
    assert measured.factors.serialisation == pytest.approx(by_records.factors.serialisation, rel=1e-6)
    assert read_efficiency(directory / "1-later").parts["bubble"] == 0.0


@pytest.mark.parametrize(
    ("ranks", "case", "says"),
    [
        (2, "untold", "give the task a method pipeline_layers"),
        (2, "tied", "the parameter 1.0.up.weight is used in stages 0 and 1"),
        (2, "batch norm", "batch normalisation"),
        (2, "batch", "use a multiple of 5"),
        (
            2,
            "weights",
            "2 missing in the checkpoint: 2.bias, 2.weight; 2 not wanted by this program: model/2.bias, model/2.weight",
        ),
        (2, "lengths", "stage 0 of the pipeline, on torch.float64 of shape [3, 9, 3], raised RuntimeError"),
        (3, "ranks", "start a multiple of 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    launches: dict[int, list[Found]], ranks: int, case: str, says: str
) -> None:
    for found in launches[ranks]:
        assert says in found["refused"][case]
