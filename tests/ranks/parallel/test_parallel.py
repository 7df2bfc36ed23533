"""Split models train as whole ones do on one rank, and any layout continues any other's checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import finished_newest_first, open_checkpoint
from hpctrain.comm import SerialWorld
from hpctrain.data import pack_arrays
from tests.ranks.parallel import parallel_cases
from tests.ranks.parallel.parallel_cases import CONTINUED, LATER, LAYOUTS, STEPS
from tests.ranks_launcher import REPOSITORY, run_command, run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches

RELATIVE = 1e-10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("parallel")
    random = np.random.default_rng(0)
    x = random.normal(size=(61, 3))
    pack_arrays(where / "data", {"x": x, "label": (x.sum(1) > 0).astype(np.int64), "id": np.arange(61)})
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """One launch for each number of ranks; each continues what others have saved."""
    return {
        n: run_ranks(n, parallel_cases.everything, str(directory), timeout_s=800).outputs for n in CONTINUED
    }


def saved_state(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Model, optimizer moments and averages in the newest checkpoint of a run, whole."""
    newest = finished_newest_first(directory / name / "checkpoints")[0]
    tensors = open_checkpoint(newest, comm=SerialWorld()).read_all()
    return {n: t for n, t in tensors.items() if n.startswith(("model/", "optimizer/", "ema/"))}


@pytest.mark.parametrize(("ranks", "layout"), [(n, name) for n in LAYOUTS for name in LAYOUTS[n]])
def test_a_split_model_trains_as_on_one_rank(
    launches: dict[int, list[dict[str, Any]]], directory: Path, ranks: int, layout: str
) -> None:
    whole = launches[1][0]["none"]
    for found in launches[ranks]:
        assert found[layout]["status"] == "finished"
        assert len(found[layout]["steps"]) == STEPS
        np.testing.assert_allclose(found[layout]["steps"], whole["steps"], rtol=RELATIVE)
        for evaluation in ("evaluation", "evaluation of the average"):
            assert found[layout][evaluation] == pytest.approx(whole[evaluation], rel=RELATIVE)
    assert whole["evaluation of the average"] != whole["evaluation"]
    # Continued runs have saved later states since.
    if not any((ranks, layout) == entry[:2] for entries in CONTINUED.values() for entry in entries):
        expected = saved_state(directory, "1-checkpointing")
        found_state = saved_state(directory, f"{ranks}-{layout}")
        assert found_state.keys() == expected.keys()
        assert any(name.endswith("exp_avg_sq") for name in expected)
        assert any(name.startswith("ema/") for name in expected)
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
        average = launches[1][0]["later"]["evaluation of the average"]
        assert continued["evaluation of the average"] == pytest.approx(average, rel=RELATIVE)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_without_samples_drops_no_step(launches: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    whole = launches[1][0]["tempered"]["steps"]
    assert all(applied for _, _, applied in whole)
    for found in launches[ranks]:
        np.testing.assert_allclose(found["tempered"]["steps"], whole, rtol=RELATIVE)


def test_a_step_that_overflows_is_skipped_on_all_ranks(launches: dict[int, list[dict[str, Any]]]) -> None:
    expected, found = (launches[2][0][name]["steps"] for name in ("fp16 none", "fp16 world"))
    applied = [step[2] for step in expected]
    assert any(applied)
    assert not all(applied)
    assert [step[2] for step in found] == applied
    losses = [[step[0] for step in steps if step[2]] for steps in (expected, found)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def test_blocks_that_are_computed_again_draw_the_same_dropout(
    launches: dict[int, list[dict[str, Any]]],
) -> None:
    found = launches[2][0]
    np.testing.assert_allclose(
        found["dropout again"]["steps"], found["dropout"]["steps"], rtol=RELATIVE, equal_nan=True
    )


def test_an_own_loop_continues_on_other_ranks(tmp_path: Path) -> None:
    script = [sys.executable, str(REPOSITORY / "examples" / "own_loop_sharded.py")]
    found = {}
    for ranks in (1, 3):
        (tmp_path / f"{ranks}").mkdir()
        done = run_command(ranks, script, cwd=tmp_path / f"{ranks}", expect=0, timeout_s=800)
        found[ranks] = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
        assert len(found[ranks]) == 10
    assert found[3] == pytest.approx(found[1], rel=1e-3)
    done = run_command(2, script, cwd=tmp_path / "3", expect=0, timeout_s=800)
    later = [float(loss) for loss in re.findall(r"step 1\d loss ([\d.]+)", done.stdout)]
    assert len(later) == 10
    assert later[-1] < found[3][-1] < found[3][0]
    averages = []
    for ranks in (1, 3):
        path = tmp_path / f"{ranks}" / "sharded" / "step-00000010.h5"
        checkpoint = open_checkpoint(path, comm=SerialWorld())
        names = [name for name in checkpoint.tensors if name.startswith("also/ema/")]
        averages.append({name: checkpoint.read(name) for name in names})
    assert averages[0].pop("also/ema/n_averaged") == averages[1].pop("also/ema/n_averaged") == 10
    assert len(averages[0]) == 10
    for name, tensor in averages[0].items():
        torch.testing.assert_close(averages[1][name], tensor, rtol=1e-2, atol=1e-2, msg=name)
    newest = open_checkpoint(tmp_path / "3" / "sharded", comm=SerialWorld())
    assert newest.read("also/ema/n_averaged") == 20
    assert float(done.stdout.split("accuracy of the averages ")[1].split()[0]) > 0.7
