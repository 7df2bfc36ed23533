"""Writes the spirals as HDF5 shards, from arrays in memory.

python examples/own_task/make_data.py data/spirals
"""

import sys
from pathlib import Path

import numpy as np

from hpctrain.data import pack_arrays

random = np.random.default_rng(0)
for part, num_samples in {"train": 4000, "test": 1000}.items():
    side = random.integers(0, 2, num_samples)
    turn = np.sqrt(random.random(num_samples)) * 3 * np.pi
    point = np.stack([np.cos(turn + np.pi * side) * turn, np.sin(turn + np.pi * side) * turn], axis=1) / 10
    point += random.normal(scale=0.02, size=point.shape)
    pack_arrays(Path(sys.argv[1]) / part, {"point": point.astype(np.float32), "side": side.astype(np.int64)})
