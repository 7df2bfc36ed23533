"""Models in a pipeline train as whole ones do on one rank, and any layout continues any other's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import pack_arrays
from hpctrain.scaling import efficiency_of, read_efficiency, read_step_times
from hpctrain.telemetry import PARTS, read_records
from tests.ranks.parallel import pipeline_cases
from tests.ranks.parallel.parallel_cases import LATER, STEPS
from tests.ranks.parallel.pipeline_cases import CONTINUED, FROM_WEIGHTS, LENGTH, OF_LENGTHS, PIPELINES
from tests.ranks.parallel.test_parallel import RELATIVE, saved_state
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pipeline")
    random = np.random.default_rng(0)
    x = random.normal(size=(61, 3))
    pack_arrays(where / "data", {"x": x, "label": (x.sum(1) > 0).astype(np.int64), "id": np.arange(61)})
    for name, samples, length in (("sequences", 61, LENGTH), ("longer", 17, LENGTH + 3)):
        x = random.normal(size=(samples, length, 3))
        pack_arrays(where / name, {"x": x, "label": (x.sum(2) > 0).astype(np.int64)})
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """One launch for each number of ranks; each continues what others have saved."""
    return {
        n: run_ranks(n, pipeline_cases.everything, str(directory), timeout_s=800).outputs for n in CONTINUED
    }


@pytest.mark.parametrize(("ranks", "layout"), [(n, name) for n in PIPELINES for name in PIPELINES[n]])
def test_a_pipeline_trains_as_one_rank(
    launches: dict[int, list[dict[str, Any]]], directory: Path, ranks: int, layout: str
) -> None:
    whole = launches[1][0]["none"]
    for found in launches[ranks]:
        assert found[layout]["status"] == "finished"
        assert len(found[layout]["steps"]) == STEPS
        np.testing.assert_allclose(found[layout]["steps"], whole["steps"], rtol=RELATIVE)
        assert found[layout]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)
    # Of what was not continued the checkpoint is of the same step.
    if not any((ranks, layout) == entry[:2] for entries in CONTINUED.values() for entry in entries):
        found_state = saved_state(directory, f"{ranks}-{layout}")
        expected = saved_state(directory, "4-of 2, data 2, zero-bubble")
        assert found_state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("ranks", "saved"), [(n, f"{entry[0]}-{entry[1]}") for n in CONTINUED for entry in CONTINUED[n]]
)
def test_any_layout_continues_any_other(
    launches: dict[int, list[dict[str, Any]]], ranks: int, saved: str
) -> None:
    whole = launches[1][0]["later"]["steps"]
    assert len(whole) == LATER - STEPS
    for found in launches[ranks]:
        continued = found[f"{saved} continued"]
        np.testing.assert_allclose(continued["steps"], whole, rtol=RELATIVE)
        assert continued["steps"][0][0] == pytest.approx(whole[0][0], rel=1e-12)


@pytest.mark.parametrize(("ranks", "name"), [(2, "fp16 pipeline"), (4, "fp16 shares")])
def test_a_step_that_overflows_is_skipped_on_all_stages(
    launches: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    expected, found = launches[2][0]["fp16 none"]["steps"], launches[ranks][0][name]["steps"]
    applied = [step[2] for step in expected]
    assert any(applied)
    assert not all(applied)
    assert [step[2] for step in found] == applied
    losses = [[step[0] for step in steps if step[2]] for steps in (expected, found)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def test_ranks_of_a_stage_that_drift_are_found_and_a_dropped_step_leaves_nothing(
    launches: dict[int, list[dict[str, Any]]],
) -> None:
    for found in launches[4]:
        text, mean = found["meddled"]
        assert re.search(
            r"parameters: '0\.0\.bias' between ranks (0.*\d) \(ranks \1 hold the same part\).* Found at step 8",
            text,
        ), text
        assert np.isfinite(mean).all()
    assert any(any(found["meddled"][1]) for found in launches[4])


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in FROM_WEIGHTS[n]])
def test_each_rank_begins_with_the_weights_of_its_stages(
    launches: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    expected = launches[1][0]["from weights none"]["steps"]
    # Not with those of the seed, nor with the moments of the run whose weights they are.
    assert expected[0][0] != pytest.approx(launches[1][0]["none"]["steps"][0][0], rel=1e-3)
    for found in launches[ranks]:
        np.testing.assert_allclose(found[f"from weights {name}"]["steps"], expected, rtol=RELATIVE)


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in OF_LENGTHS[n]])
def test_samples_may_have_other_shapes_in_each_step_and_in_evaluations(
    launches: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    whole = launches[1][0]["of lengths none"]
    assert len(whole["evaluations"]) == STEPS // 4
    for found in launches[ranks]:
        np.testing.assert_allclose(found[f"of lengths {name}"]["steps"], whole["steps"], rtol=RELATIVE)
        np.testing.assert_allclose(
            found[f"of lengths {name}"]["evaluations"], whole["evaluations"], rtol=RELATIVE
        )


def test_tensors_of_several_names_are_saved_and_loaded(launches: dict[int, list[dict[str, Any]]]) -> None:
    whole = launches[1][0]["twice named"]["steps"]
    assert len(whole) == LATER - STEPS
    for found in launches[2]:
        np.testing.assert_allclose(found["twice named"]["steps"], whole, rtol=RELATIVE)


def test_the_bubble_is_a_part_of_the_step_in_records_and_efficiencies(
    launches: dict[int, list[dict[str, Any]]], directory: Path
) -> None:
    for rank in range(2):
        steps = [
            r["seconds"]
            for r in read_records(directory / "2-1f1b" / "metrics" / f"rank-{rank:05}.jsonl")
            if r["kind"] == "step"
        ]
        assert len(steps) == STEPS
        for seconds in steps:
            assert min(seconds["bubble"], seconds["compute"]) > 0
            assert sum(seconds[part] for part in (*PARTS, "other")) == pytest.approx(
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
        (2, "weights", "2 missing there: 2.bias, 2.weight; 2 not wanted here: model/2.bias, model/2.weight"),
        (2, "lengths", "stage 0 of the pipeline, on torch.float64 of shape [3, 9, 3], raised RuntimeError"),
        (3, "ranks", "start a multiple of 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    launches: dict[int, list[dict[str, Any]]], ranks: int, case: str, says: str
) -> None:
    for found in launches[ranks]:
        assert says in found["refused"][case]
