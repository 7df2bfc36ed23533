"""The recipe of the example trains in a pipeline by the command line, and one rank continues what it has saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import open_checkpoint
from hpctrain.comm import SerialWorld
from hpctrain.data import pack_arrays
from hpctrain.report import make_report
from tests.ranks_launcher import REPOSITORY, run_command
from tests.run_files import losses_of

pytestmark = [pytest.mark.launches, pytest.mark.timeout(1500)]

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
RECIPE = str(REPOSITORY / "examples" / "characters_pipeline.toml")
STEPS, SAVED = 5, 3
WITHOUT = ("parallel.pipeline=1", "parallel.micro_batches=1")


class Case(NamedTuple):
    """rel: how far the losses may be apart, of the next step and of those after it."""

    ranks: int
    precision: str
    schedule: str
    rel: tuple[float, float]


CASES = [Case(2, "fp32", "1f1b", (1e-6, 1e-4)), Case(4, "fp64", "interleaved", (1e-12, 1e-10))]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with windows of random bytes, where the recipe expects its data."""
    folder = tmp_path_factory.mktemp("pipeline-recipe")
    random = np.random.default_rng(0)
    for name, samples in (("train", 72), ("test", 16)):
        tokens = random.integers(0, 256, (samples, 129), dtype=np.uint8)
        pack_arrays(folder / "data" / "python-source" / name, {"tokens": tokens})
    return folder


def losses(
    where: Path, ranks: int, name: str, *settings: str, resume: Path | None = None
) -> dict[int, float]:
    """Trains as the recipe says, with these settings. Returns the loss by step."""
    settings = (
        f"run.directory=runs/{name}",
        f"run.steps={STEPS}",
        "data.global_batch=16",
        "optimizer.ema=0.5",
        *settings,
    )
    words = [HPCTRAIN, "train", RECIPE, *(word for one in settings for word in ("--set", one))]
    words += ["--resume", str(resume)] if resume is not None else []
    run_command(ranks if ranks > 1 else None, words, cwd=where, timeout_s=300, expect=0)
    return losses_of(where / "runs" / name)


def averages(where: Path, name: str) -> dict[str, torch.Tensor]:
    """Returns the averages of the parameters after the last step."""
    checkpoint = open_checkpoint(where / "runs" / name / "checkpoints", comm=SerialWorld())
    assert checkpoint.document["ema"] == {"num_updates": STEPS}
    return {each: checkpoint.read(each) for each in checkpoint.tensors if each.startswith("ema/")}


def places_in_report(directory: Path) -> dict[str, int]:
    """Returns the number of ranks at each place in the model."""
    report = make_report([directory], with_plots=False)
    table = next(table for table in report.tables if table.name == f"axes-{directory.name}")
    assert all(isinstance(value, float) and value >= 0 for row in table.rows for value in row.values[1:])
    return {row.name: int(str(row.values[0])) for row in table.rows}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks}-{case.precision}")
def test_the_recipe_trains_in_a_pipeline_and_one_rank_continues_it(where: Path, case: Case) -> None:
    name, precision = f"{case.ranks}", f"run.precision={case.precision}"
    saves = f"checkpoint.every_steps={SAVED}"
    everyone = "telemetry.ranks=all"
    split = losses(where, case.ranks, name, precision, saves, everyone, f"parallel.schedule={case.schedule}")
    assert list(split) == list(range(1, STEPS + 1))
    saved = where / "runs" / name / "checkpoints" / f"step-{SAVED:08}.h5"
    stages = places_in_report(where / "runs" / name)
    assert stages == {"stage 0": case.ranks // 2, "stage 1": case.ranks // 2}
    continued = losses(where, 1, f"{name}-continued", precision, *WITHOUT, resume=saved)
    assert list(continued) == list(range(SAVED + 1, STEPS + 1))
    next_loss, later_losses = case.rel
    assert continued[SAVED + 1] == pytest.approx(split[SAVED + 1], rel=next_loss)
    assert list(continued.values()) == pytest.approx([split[step] for step in continued], rel=later_losses)
    in_stages, whole = averages(where, name), averages(where, f"{name}-continued")
    assert in_stages.keys() == whole.keys()
    assert len(whole) > 10
    for each, tensor in whole.items():
        torch.testing.assert_close(in_stages[each], tensor, rtol=later_losses, atol=later_losses, msg=each)
