"""Which sample when: a pure function of seed, epoch and position, the same for any number of ranks.

The order of an epoch is a permutation that is evaluated, never stored: constant memory at any index of any
size. It is a generalised Feistel cipher on Z_a x Z_b with a * b just above the number of samples, and cycle
walking for the few values beyond it.
Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: its generalised-Feistel
and its cycle-walking cipher. The round function is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014).
numpy's own permutation is not used: its stream may change between versions, and a resumed run must not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError, RecipeError

# A checkpoint that keeps a place in the data can record this: positions of another order mean other samples.
ORDER_NAME = "feistel-1"

# Few values leave a round little to mix: small sets get more rounds, or some permutations would be favoured.
_ROUNDS_LARGE = 10
_ROUNDS_SMALL = 24
_SMALL = 1 << 16
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MAX_SAMPLES = 1 << 62


class LastBatch(str, Enum):
    """What becomes of the samples that do not fill a whole global batch at the end of an epoch."""

    KEEP = "keep"
    DROP = "drop"


class Span(NamedTuple):
    """Positions start, ..., stop - 1."""

    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser, elementwise; arithmetic is modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int, *, rounds: int) -> NDArray[np.uint64]:
    """Independent keys for each round, shape (rounds,)."""
    seed_key = _mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    epoch_key = _mix(seed_key ^ np.array([epoch & _MASK], dtype=np.uint64))
    steps = np.arange(1, rounds + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mix(epoch_key + steps)


def _below(hashed: NDArray[np.uint64], bound: int) -> NDArray[np.uint64]:
    """Map 64-bit hashes to [0, bound), bound <= 2**32, by a multiplication instead of a division."""
    return ((hashed >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)


def _encrypt(values: NDArray[np.uint64], *, a: int, b: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass of the network: a bijection of [0, a * b)."""
    left, right = values % np.uint64(a), values // np.uint64(a)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = left + _below(_mix(right + key), a)
            left = np.where(left >= a, left - np.uint64(a), left)
        else:
            right = right + _below(_mix(left + key), b)
            right = np.where(right >= b, right - np.uint64(b), right)
    return left + right * np.uint64(a)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """The order of the samples in one epoch. Shuffled, it is another permutation for each (seed, epoch)."""

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.num_samples <= _MAX_SAMPLES:
            raise DataError(
                f"an order of {self.num_samples} samples was asked, 0 to {_MAX_SAMPLES} are possible"
            )
        if self.seed < 0 or self.epoch < 0:
            raise RecipeError(f"seed {self.seed} and epoch {self.epoch} must not be negative")

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample indices at positions start, ..., stop - 1 of the epoch: int64, shape (stop - start,).

        Time and memory grow with stop - start only. Raises DataError if the span leaves the epoch.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise DataError(
                f"positions {start} to {stop} were asked of an epoch of {self.num_samples} samples"
            )
        positions = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle or start == stop:
            return positions
        a = math.isqrt(self.num_samples - 1) + 1
        b = -(-self.num_samples // a)
        rounds = _ROUNDS_SMALL if self.num_samples < _SMALL else _ROUNDS_LARGE
        keys = _round_keys(self.seed, self.epoch, rounds=rounds)
        values = _encrypt(positions.astype(np.uint64), a=a, b=b, keys=keys)
        # Walk along the cycle until back inside: about 2 / sqrt(num_samples) of the values need it at most.
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = _encrypt(values[outside], a=a, b=b, keys=keys)
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)


def rank_share(start: int, stop: int, *, rank: int, num_ranks: int) -> Span:
    """This rank's contiguous part of positions start, ..., stop - 1.

    The parts of ranks 0, 1, ... follow each other, and their sizes differ by at most one (the first ranks
    have the larger ones). With fewer positions than ranks some are empty.
    """
    if not 0 <= rank < num_ranks:
        raise DataError(f"rank {rank} is not one of {num_ranks} ranks")
    share, extra = divmod(stop - start, num_ranks)
    first = start + rank * share + min(rank, extra)
    return Span(first, first + share + (rank < extra))


def num_batches(num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0) -> int:
    """Global batches from position `start` to the end of the epoch."""
    whole, rest = divmod(num_samples - start, global_batch)
    return whole + (rest > 0 and last_batch is LastBatch.KEEP)


def batch_spans(
    num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0
) -> Iterator[Span]:
    """The positions of each global batch from `start` on. Independent of the number of ranks.

    `start` counts samples, not batches, so that a run may go on with another batch size.
    """
    count = num_batches(num_samples, global_batch=global_batch, last_batch=last_batch, start=start)
    for number in range(count):
        first = start + number * global_batch
        yield Span(first, min(first + global_batch, num_samples))
