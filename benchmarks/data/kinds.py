"""The samples that are read: small images, volumes, windows of tokens. Imports numpy only.

The first bytes of each sample are its number, by which every reader is checked: an epoch contains each sample once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A dataset of `num_samples` samples of `shape` and `dtype`, read in batches of `batch`. labels: whether each
    sample has an int64 label.

    values: elements are random integers below this; fewer values compress better. tokens: whether the samples are
    windows of a token stream; then shape is (window + 1,), and each window shares its last token with the next one.
    """

    name: str
    num_samples: int
    shape: tuple[int, ...]
    dtype: str
    batch: int
    labels: bool = True
    values: int = 256
    tokens: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Kind:
        return cls(**{**fields, "shape": tuple(fields["shape"])})

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def window(self) -> int:
        return self.shape[0] - 1


def kinds(*, share: float) -> dict[str, Kind]:
    """Returns the kinds by name. share: part of the full number of samples; 1 for figures, less for a quick check."""

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
    """Yields all samples in order, some at a time: (number of the first one, samples of shape (n, *shape))."""
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
    """Returns the token stream that contains all windows, shape (num_samples * window + 1,)."""
    parts = [samples[:, :-1].reshape(-1) for _, samples in blocks(kind)]
    return np.concatenate([*parts, np.array([kind.num_samples], dtype=kind.dtype)])


def numbers_of(kind: Kind, samples: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the numbers of the samples, shape (n,), int64. samples: shape (n, *kind.shape)."""
    flat = np.asarray(samples).reshape(len(samples), -1)
    if kind.dtype == "uint8":
        return flat[:, 0].astype(np.int64) + 256 * flat[:, 1].astype(np.int64)
    return flat[:, 0].astype(np.int64)
