"""Two ranks on one device, started as a user starts them, which communicate over MPI through host memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.resilience import StopRequest
from hpctrain.run import load_recipe
from hpctrain.run.training import Resume, train
from hpctrain.telemetry import read_records
from tests.gpu.check import HPCTRAIN, Check, largest_difference, run
from tests.gpu.traces import events_of, overlap

pytestmark = pytest.mark.launches

Launched = Callable[[str], Mapping[str, Any]]
TIMEOUT_S = 240.0
STEPS = 30
# For losses near 2.3. Two ranks sum gradients in another order than one, and a GPU sums products in another order.
LOSS_WITHIN = 2e-3

RECIPE = """
[run]
directory = "{directory}"
steps = {steps}
seed = 1
backend = "{backend}"
device = "{device}"
threads_per_rank = 1
timeout_s = 120

[task]
target = "hpctrain.tasks.digits:Digits"

[data]
train = "{data}/train"
held_out = "{data}/test"
global_batch = 64

[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9

[checkpoint]
every_steps = 10
mode = "async"

[telemetry]
metrics_every_steps = 1
"""


def test_reductions(check: Check, launched: Launched) -> None:
    found = _rank_case(check, "reductions", launched)
    text = f"{found['methods']} methods sum {found['buckets']} buckets as on the CPU, 2 ranks"
    check.found(text, needs_gpu=["buckets on a GPU"])


def test_updater(check: Check, launched: Launched) -> None:
    found = _rank_case(check, "updater", launched)
    text = "8 steps end at the CPU's parameters, 2 ranks, the same bits on both"
    check.found(text, needs_gpu=["gradients on a GPU"])
    check.figures["largest difference, share"] = found["difference"]


def test_profile(check: Check, launched: Launched) -> None:
    found = _rank_case(check, "profile", launched)
    events = events_of(Path(found["trace"]))
    assert any("addmm" in event["name"] for event in events), "the trace has no forward pass"
    check.found("a trace of three steps, 2 ranks on one device", needs_gpu=["kernels and copies"])
    check.figures["ms exposed per step"] = found["exposed_ms"]
    if check.has_gpu:
        times = overlap(events)
        assert times.kernels_ms > 0 < times.copies_ms, f"the trace has no kernels or no copies: {times}"
        check.figures |= {
            "ms kernels": times.kernels_ms, "ms copies": times.copies_ms,
            "share of copies during kernels": times.share,
        }  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Returns what all cases of `two_ranks_program.py` found on a device, of one launch, because starting ranks takes
    longer than the cases."""

    @functools.cache
    def on(device: str) -> Mapping[str, Any]:
        output = tmp_path_factory.mktemp("ranks")
        words = [sys.executable, "-m", "tests.gpu.two_ranks_program", device, str(output)]
        run(words, num_ranks=2, timeout_s=TIMEOUT_S)
        return dict(json.loads((output / "ranks.json").read_text()))

    return on


def _rank_case(check: Check, name: str, launched: Launched) -> Mapping[str, Any]:
    """Returns what the ranks found in case `name`; fails if it failed on one of them."""
    found: Mapping[str, Any] = launched(str(check.device))[name]
    assert "failed" not in found, found["failed"]
    return found


# ---------------------------------------------------------------------- a recipe


def test_digits(check: Check) -> None:
    """`hpctrain train` with two ranks on the device has the losses of one rank on the CPU in every step."""
    _pack_digits(check.scratch / "data")
    expected = _train(check, "cpu-1", device="cpu", num_ranks=None)
    found = _train(check, "device-2", device=str(check.device), num_ranks=2)
    assert found["device"] == check.device.type, f"the run computed on {found['device']}"
    losses, wanted = found["losses"], expected["losses"]
    assert len(losses) == len(wanted) == STEPS
    worst = largest_difference(losses, wanted, within=LOSS_WITHIN, what="2 ranks and one on the CPU")
    assert wanted[-1] < 0.8 * wanted[0], "nothing was learned, so nothing was compared"
    assert found["summary"]["checkpoints_written"] >= 3
    text = f"{STEPS} steps of digits on 2 ranks have the losses of one on the CPU"
    check.found(text, needs_gpu=["two ranks on one GPU"])
    check.figures |= {
        "largest difference of a loss": worst,
        "samples/s": found["summary"]["samples_per_s"],
        "share of a step exposed to communication": found["summary"]["exposed_sync_share"],
    }


def _train(check: Check, name: str, *, device: str, num_ranks: int | None) -> dict[str, Any]:
    directory = check.scratch / name
    recipe = check.scratch / f"{name}.toml"
    backend = "mpi" if num_ranks is not None else "serial"
    recipe.write_text(
        RECIPE.format(
            directory=directory, steps=STEPS, backend=backend, device=device, data=check.scratch / "data"
        )
    )
    if num_ranks is None:
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints is none of a check's lines
            train(load_recipe(recipe), recipe_path=recipe, resume=Resume(), stop=StopRequest())
    else:
        run([*HPCTRAIN, "train", str(recipe)], num_ranks=num_ranks, timeout_s=TIMEOUT_S)
    records = list(read_records(directory / "metrics" / "rank-00000.jsonl"))
    environment = json.loads((directory / "environment.json").read_text())
    return {
        "losses": [record["loss"] for record in records if record["kind"] == "step"],
        "summary": json.loads((directory / "summary.json").read_text()),
        "device": environment["ranks"][0]["device"].split(":")[0],
    }


def _pack_digits(directory: Path) -> None:
    """Packs synthetic data of the shapes of digits, since scikit-learn may not be installed: one picture per class,
    with noise."""
    rng = np.random.default_rng(7)
    pictures = rng.integers(0, 17, (10, 1, 8, 8))
    for part, num_samples in (("train", 1024), ("test", 256)):
        labels = rng.integers(0, 10, num_samples)
        noisy = pictures[labels] + rng.integers(-5, 6, (num_samples, 1, 8, 8))
        pack_arrays(
            directory / part, {"image": noisy.clip(0, 16).astype(np.uint8), "label": labels.astype(np.uint8)}
        )
