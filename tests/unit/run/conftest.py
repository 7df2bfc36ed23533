"""A working directory with a small dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.data import pack_arrays
from tests.unit.run.training_cases import SAMPLES


@pytest.fixture
def where(tmp_path: Path) -> Path:
    images, labels = load_digits(return_X_y=True)
    pack_arrays(
        tmp_path / "data",
        {
            "image": (images[:SAMPLES] / 16).astype(np.float32),
            "label": labels[:SAMPLES].astype(np.int64),
            "id": np.arange(SAMPLES),
        },
    )
    return tmp_path
