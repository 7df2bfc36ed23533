"""The files of a user who measures a recipe, and what must be left of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from hpctrain.data import pack_arrays

RECIPE = """
[run]
name = "digits"
directory = "runs/digits"
epochs = 1
backend = "{backend}"

[task]
target = "{target}"

[data]
train = "data/train"
held_out = "data/test"
global_batch = 32

[checkpoint]
every_steps = 1
"""

# A task in the folder of its recipe. It fails always, or with one thread only, or sleeps, as the test asks.
TASK = """
import os, time, torch
from hpctrain.tasks.digits import Digits


class Mine(Digits):
    def build_model(self):
        if os.environ.get("MINE") in ("fail", f"fail with {torch.get_num_threads()} thread"):
            raise RuntimeError("the model is out of order")
        return super().build_model()

    def loss(self, model, fields):
        if os.environ.get("MINE") == "slow":
            time.sleep(0.3)
        return super().loss(model, fields)
"""


def make_workplace(place: Path) -> None:
    """Makes a dataset, a task beside its recipe, an empty folder `scratch`, and a checkpoint in the run directory."""
    images, labels = load_digits(return_X_y=True)
    fields = {"image": images.reshape(-1, 1, 8, 8).astype(np.float32), "label": labels.astype(np.int64)}
    pack_arrays(place / "data" / "train", fields)
    (place / "mine.py").write_text(TASK)
    (place / "recipe.toml").write_text(RECIPE.format(target="mine:Mine", backend="auto"))
    precious = place / "runs" / "digits" / "checkpoints"
    precious.mkdir(parents=True)
    (precious / "step-00000007.h5").write_text("precious")
    (place / "scratch").mkdir()


def assert_nothing_left(place: Path) -> None:
    assert list((place / "scratch").iterdir()) == []
    kept = [path for path in (place / "runs").rglob("*") if path.is_file()]
    assert [path.name for path in kept] == ["step-00000007.h5"]
    assert kept[0].read_text() == "precious"
