"""A small dataset for the tests of reading."""

from __future__ import annotations

import numpy as np

NUM_SAMPLES = 100


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "small": random.random((NUM_SAMPLES, 3), dtype=np.float32),
        "large": random.integers(0, 1 << 30, (NUM_SAMPLES, 40, 32), dtype=np.int32),  # 5 KB: copied by row
        "label": np.arange(NUM_SAMPLES),
    }
