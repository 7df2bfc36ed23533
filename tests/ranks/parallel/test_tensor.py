"""Layers that are split over tensor groups train as whole ones do on one rank, and any layout continues any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import pack_arrays
from hpctrain.telemetry import read_records
from tests.ranks.parallel import tensor_cases
from tests.ranks.parallel.parallel_cases import LATER, STEPS
from tests.ranks.parallel.tensor_cases import CONTINUED, LAYOUTS
from tests.ranks.parallel.test_parallel import RELATIVE, saved_state
from tests.ranks_launcher import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tensor")
    random = np.random.default_rng(0)
    pack_arrays(where / "data", {"tokens": random.integers(0, 10, (61, 5)), "id": np.arange(61)})
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks what each rank found: trainings, then those that continue another layout's."""
    found = {n: run_ranks(n, tensor_cases.trained, str(directory), timeout_s=800).outputs for n in LAYOUTS}
    for n in (2, 1):
        later = run_ranks(n, tensor_cases.continued, str(directory), timeout_s=800).outputs
        found[n] = [{**before, **after} for before, after in zip(found[n], later, strict=True)]
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(n, name) for n in LAYOUTS for name in LAYOUTS[n]])
def test_split_layers_train_as_on_one_rank(
    launches: dict[int, list[dict[str, Any]]], directory: Path, ranks: int, layout: str
) -> None:
    whole = launches[1][0]["none"]
    for found in launches[ranks]:
        assert found[layout]["status"] == "finished"
        assert len(found[layout]["steps"]) == STEPS
        np.testing.assert_allclose(found[layout]["steps"], whole["steps"], rtol=RELATIVE)
        assert found[layout]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)
    if all(name != f"{ranks}-{layout}" for entries in CONTINUED.values() for name, _ in entries):
        expected = saved_state(directory, "1-reference")
        found_state = saved_state(directory, f"{ranks}-{layout}")
        assert found_state.keys() == expected.keys()
        assert any(name.endswith("exp_avg_sq") for name in expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize(("ranks", "name"), [(n, entry[0]) for n in CONTINUED for entry in CONTINUED[n]])
def test_any_layout_continues_split_layers_and_the_other_way_round(
    launches: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    whole = launches[1][0]["later"]["steps"]
    assert len(whole) == LATER - STEPS
    for found in launches[ranks]:
        np.testing.assert_allclose(found[name]["steps"], whole, rtol=RELATIVE)
        assert found[name]["steps"][0][0] == pytest.approx(whole[0][0], rel=1e-12)


@pytest.mark.parametrize("layout", ["fp16", "fp16, sequence"])
def test_a_step_that_overflows_is_skipped_on_all_ranks(
    launches: dict[int, list[dict[str, Any]]], layout: str
) -> None:
    expected = launches[1][0]["fp16"]["steps"]
    applied = [step[2] for step in expected]
    assert any(applied)
    assert not all(applied)
    for found in launches[2]:
        steps = found[layout]["steps"]
        assert [step[2] for step in steps] == applied
        np.testing.assert_allclose(
            [step[0] for step in steps if step[2]], [step[0] for step in expected if step[2]], rtol=1e-2
        )


def test_each_rank_drops_its_part_of_what_one_rank_drops(launches: dict[int, list[dict[str, Any]]]) -> None:
    whole = launches[1][0]["drops"]
    assert whole["steps"] != launches[1][0]["none"]["steps"]
    for found in launches[2]:
        np.testing.assert_allclose(found["drops"]["steps"], whole["steps"], rtol=RELATIVE)
        assert found["drops"]["evaluation"] == pytest.approx(whole["evaluation"], rel=RELATIVE)


def test_between_split_layers_a_rank_has_its_part_of_the_sequence(
    launches: dict[int, list[dict[str, Any]]],
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


def test_samples_are_counted_once(launches: dict[int, list[dict[str, Any]]], directory: Path) -> None:
    records = [
        [
            r
            for r in read_records(directory / "4-by node" / "metrics" / f"rank-{rank:05}.jsonl")
            if r["kind"] == "step"
        ]
        for rank in range(4)
    ]
    samples = [sum(rank[step]["samples"] for rank in records) for step in range(6)]
    assert samples == [12, 12, 12, 12, 12, 1]
    assert [step["global_samples"] for step in records[3][:6]] == [12, 24, 36, 48, 60, 61]


def test_a_step_that_is_given_up_leaves_nothing_behind(launches: dict[int, list[dict[str, Any]]]) -> None:
    for found in (launch["abandoned"] for launch in launches[4]):
        after, first = found["norms"]
        assert after == pytest.approx(first, rel=RELATIVE)
        assert len(found["refused"]) == 2
        assert all("backward ran twice before step()" in text for text in found["refused"])


def test_gradients_that_step_has_yet_to_sum_refuse_every_use(
    launches: dict[int, list[dict[str, Any]]],
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


def test_an_own_loop_trains_on_the_data_axis(launches: dict[int, list[dict[str, Any]]]) -> None:
    whole = launches[1][0]["own loop"]
    for found in launches[2]:
        np.testing.assert_allclose(found["own loop"]["steps"], whole["steps"], rtol=RELATIVE)
    for found in (*launches[2], *launches[4]):
        assert found["own loop"]["alike"]
    # Four ranks went on from what two had saved: of a tensor group both draw the same numbers.
    drawn = launches[4][0]["own loop"]["drawn"]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert launches[4][0]["own loop"]["steps"][0][0] < whole["steps"][0][0]
