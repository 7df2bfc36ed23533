"""Data and recipes of the faulty tasks."""

from pathlib import Path

import numpy as np

from hpctrain.data import pack_arrays

RECIPE = """
[run]
directory = "{where}/run"
steps = 50
[task]
target = "tests.check.faulty_tasks:{task}"
[data]
train = "{where}/data"
held_out = "{where}/data"
global_batch = 24
{data}
[optimizer]
lr = 0.02
{optimizer}
"""


def make_data(where: Path, *, nan_every: int | None = None) -> None:
    """nan_every: one of so many samples has a NaN."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(240, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    if nan_every is not None:
        x[::nan_every, 2] = np.nan
    pack_arrays(where / "data", {"x": x, "y": y, "length": numbers.integers(1, 9, 240).astype(np.int64)})


def write_recipe(where: Path, task: str, *, data: str = "", optimizer: str = "", name: str = "") -> Path:
    path = where / f"{name or task}.toml"
    path.write_text(RECIPE.format(where=where, task=task, data=data, optimizer=optimizer))
    return path
