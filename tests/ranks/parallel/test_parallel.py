"""Models with sharded parameters train as whole ones do on one rank; any layout continues any checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import open_checkpoint
from hpctrain.comm import SerialWorld
from tests.ranks.parallel.layouts import RELATIVE, ContinuedTests, Found, LayoutTests, OverflowTests
from tests.ranks.parallel.parallel_cases import FAMILY
from tests.ranks_launcher import REPOSITORY, run_command

__all__ = ["FAMILY"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches


class TestLayouts(LayoutTests, ContinuedTests, OverflowTests):
    pass


def test_the_average_of_the_parameters_has_an_evaluation_of_its_own(launches: dict[int, list[Found]]) -> None:
    whole = launches[1][0]["none"]
    assert whole["evaluation of the average"] != whole["evaluation"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_without_samples_drops_no_step(launches: dict[int, list[Found]], ranks: int) -> None:
    whole = launches[1][0]["tempered"]["steps"]
    assert all(applied for _, _, applied in whole)
    for found in launches[ranks]:
        np.testing.assert_allclose(found["tempered"]["steps"], whole, rtol=RELATIVE)


def test_blocks_that_are_computed_again_draw_the_same_dropout(
    launches: dict[int, list[Found]],
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
