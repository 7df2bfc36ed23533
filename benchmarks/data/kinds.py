"""The samples that are read: small images, volumes, windows of tokens. Only numpy is needed here.

Each sample carries its own number in its first bytes, so that every reader can be checked: all samples of an
epoch, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Kind:
    """num_samples of `shape` and `dtype`, in batches of `batch`. labels: an int64 beside each.

    values: random below this; fewer compress better. Tokens: shape is (window + 1,), and the windows follow
    one another in a stream, each sharing its last token with the next.
    """

    name: str
    num_samples: int
    shape: tuple[int, ...]
    dtype: str
    batch: int
    labels: bool = True
    values: int = 256
    tokens: bool = False

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def window(self) -> int:
        return self.shape[0] - 1


def kinds(*, share: float) -> dict[str, Kind]:
    """share: of the full sizes; 1 for the record, less to see that it runs."""

    def some(number: int, *, batch: int) -> int:
        return max(2, int(share * number) // batch) * batch

    return {
        "images": Kind(
            name="images", num_samples=some(20_032, batch=64), shape=(64, 64, 3), dtype="uint8", batch=64
        ),
        "volumes": Kind(
            name="volumes", num_samples=some(48, batch=4), shape=(128, 128, 128), dtype="float32", batch=4
        ),
        "tokens": Kind(
            name="tokens", num_samples=some(9_984, batch=64), shape=(1025,), dtype="uint16", batch=64,
            labels=False, tokens=True, values=50_000,
        ),
        "gzip": Kind(
            name="gzip", num_samples=some(6_400, batch=64), shape=(64, 64, 3), dtype="uint8", batch=64, values=16
        ),
    }  # fmt: skip


def blocks(kind: Kind) -> Iterator[tuple[int, NDArray[Any]]]:
    """(number of the first, samples) of some samples at a time, all in order; samples: (n, *shape)."""
    for start in range(0, kind.num_samples, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, kind.num_samples))
        random = np.random.default_rng(1000 + start)
        some = random.integers(0, kind.values, (len(numbers), *kind.shape), dtype=np.uint16)
        samples = some.astype(kind.dtype)
        flat = samples.reshape(len(numbers), -1)
        if kind.dtype == "float32":
            flat[:, 0] = numbers
        elif kind.dtype == "uint16":
            flat[:, 0] = numbers
            flat[:, -1] = numbers + 1  # the first of the next window
        else:
            flat[:, 0], flat[:, 1] = numbers % 256, numbers // 256
        yield start, samples


def stream(kind: Kind) -> NDArray[Any]:
    """All windows of tokens as the stream that they are cut from."""
    parts = [samples[:, :-1].reshape(-1) for _, samples in blocks(kind)]
    return np.concatenate([*parts, np.array([kind.num_samples], dtype=kind.dtype)])


def numbers_of(kind: Kind, samples: NDArray[Any]) -> NDArray[np.int64]:
    """Which samples these are, int64 (n,)."""
    flat = np.asarray(samples).reshape(len(samples), -1)
    if kind.dtype == "uint8":
        return flat[:, 0].astype(np.int64) + 256 * flat[:, 1].astype(np.int64)
    return flat[:, 0].astype(np.int64)
