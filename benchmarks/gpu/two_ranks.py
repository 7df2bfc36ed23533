"""Checks two ranks on one device, started as a user starts them, which communicate over MPI through host memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.compare import require
from benchmarks.gpu.launch import HPCTRAIN, run
from benchmarks.gpu.outcome import CheckFailed, Found, Setting
from benchmarks.gpu.traces import events_of, overlap
from hpctrain.data import pack_arrays
from hpctrain.resilience import StopRequest
from hpctrain.run import load_recipe
from hpctrain.run.training import Resume, train
from hpctrain.telemetry import read_records

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


def reductions(setting: Setting) -> Found:
    found = _rank_case(setting, "reductions")
    needs = () if setting.has_gpu else ("buckets on a GPU",)
    return Found(
        text=f"{found['methods']} methods sum {found['buckets']} buckets as on the CPU, 2 ranks",
        needs_gpu=needs,
    )


def updater(setting: Setting) -> Found:
    found = _rank_case(setting, "updater")
    needs = () if setting.has_gpu else ("gradients on a GPU",)
    return Found(
        text="8 steps end at the CPU's parameters, 2 ranks, the same bits on both",
        figures={"largest difference, share": found["difference"]}, needs_gpu=needs,
    )  # fmt: skip


def profile(setting: Setting) -> Found:
    found = _rank_case(setting, "profile")
    events = events_of(Path(found["trace"]))
    require(any("addmm" in event["name"] for event in events), "the trace has no forward pass")
    figures = {"ms exposed a step": found["exposed_ms"]}
    if not setting.has_gpu:
        return Found(
            text="a trace of three steps, 2 ranks", figures=figures, needs_gpu=("kernels and copies",)
        )
    times = overlap(events)
    require(times.kernels_ms > 0 and times.copies_ms > 0, f"the trace has no kernels or no copies: {times}")
    figures |= {
        "ms kernels": times.kernels_ms, "ms copies": times.copies_ms, "share of copies during kernels": times.share
    }  # fmt: skip
    return Found(text="a trace of three steps, 2 ranks on one GPU", figures=figures)


def _rank_case(setting: Setting, name: str) -> Mapping[str, Any]:
    """Returns what the ranks found in case `name`. Raises CheckFailed if it failed on one of them."""
    found: Mapping[str, Any] = _launched(str(setting.device), setting.scratch.parent)[name]
    if "failed" in found:
        raise CheckFailed(found["failed"])
    return found


@functools.cache
def _launched(device: str, scratch: Path) -> Mapping[str, Any]:
    """Runs all cases of `ranks.py` in one launch, because starting ranks takes longer than the cases."""
    output = scratch / "ranks"
    output.mkdir(exist_ok=True)  # from a launch that failed
    run([sys.executable, "-m", "benchmarks.gpu.ranks", device, str(output)], num_ranks=2, timeout_s=TIMEOUT_S)
    return dict(json.loads((output / "ranks.json").read_text()))


# ---------------------------------------------------------------------- a recipe


def digits(setting: Setting) -> Found:
    """Checks that `hpctrain train` with two ranks on the device has the losses of one rank on the CPU in every step."""
    _pack_digits(setting.scratch / "data")
    expected = _train(setting, "cpu-1", device="cpu", num_ranks=None)
    found = _train(setting, "device-2", device=str(setting.device), num_ranks=2)
    require(found["device"] == setting.device.type, f"the run computed on {found['device']}")
    pairs = list(zip(found["losses"], expected["losses"], strict=True))
    require(len(pairs) == STEPS, f"{len(pairs)} steps were recorded instead of {STEPS}")
    worst = max(abs(mine - wanted) for mine, wanted in pairs)
    require(
        worst <= LOSS_WITHIN,
        f"a loss differs from one rank's on the CPU by {worst:.3g}, more than {LOSS_WITHIN:g}",
    )
    require(pairs[-1][1] < 0.8 * pairs[0][1], "nothing was learned, so nothing was compared")
    require(found["summary"]["checkpoints_written"] >= 3, "checkpoints are missing")
    figures = {
        "largest difference of a loss": worst,
        "samples/s": found["summary"]["samples_per_s"],
        "share of a step exposed to communication": found["summary"]["exposed_sync_share"],
    }
    needs = () if setting.has_gpu else ("two ranks on one GPU",)
    return Found(
        text=f"{STEPS} steps of digits on 2 ranks have the losses of one on the CPU",
        figures=figures,
        needs_gpu=needs,
    )


def _train(setting: Setting, name: str, *, device: str, num_ranks: int | None) -> dict[str, Any]:
    directory = setting.scratch / name
    recipe = setting.scratch / f"{name}.toml"
    backend = "mpi" if num_ranks is not None else "serial"
    recipe.write_text(
        RECIPE.format(
            directory=directory, steps=STEPS, backend=backend, device=device, data=setting.scratch / "data"
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
