"""Small datasets of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data import (
    Dataset,
    pack_arrays,
)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Dataset]:
    """The same 97 numbers in 1, 4 and 14 shards."""
    opened = {}
    for shard_samples in (97, 26, 7):
        directory = tmp_path_factory.mktemp("data")
        pack_arrays(directory, {"label": np.arange(97)}, shard_samples=shard_samples)
        opened[shard_samples] = Dataset.open(directory)
    return opened
