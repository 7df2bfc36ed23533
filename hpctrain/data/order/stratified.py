"""Each sample once per epoch, with the classes in the dataset's proportions in any run of positions.

Sample j of the n samples of a class (in the class's own shuffled order) has the key (j + u) / n, where u in [0, 1)
is drawn for the class and the epoch; the epoch is sorted by key. Between keys s and t there are n (t - s) samples
of each class, plus or minus one. So the number of samples of a class among any B consecutive positions, with any number
of ranks and any batch size, differs from B n / N by at most 1 + K n / N (K classes, N samples).
No sorted list of the epoch is needed: the keys near a position are computed from its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import check_order, positions
from hpctrain.data.order.permutation import epoch_key, hashes, permute_groups
from hpctrain.errors import DataError

_PHASES, _MEMBERS = 4, 5  # purposes of keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Strata:
    """The samples of each class c: members[starts[c] : starts[c + 1]]. 8 bytes per sample (4 below 2**32 samples)."""

    members: NDArray[np.integer]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, classes: NDArray[np.generic]) -> Strata:
        """classes: integers or bool, shape (n,), one for each sample. Raises DataError for other arrays."""
        values = np.asarray(classes)
        if values.ndim != 1 or values.dtype.kind not in "biu" or not len(values):
            raise DataError(
                f"strata are {values.dtype.name} of shape {values.shape}: one integer per sample is needed"
            )
        members = np.argsort(values, kind="stable")
        _, counts = np.unique(values, return_counts=True)
        if len(values) < 1 << 32:
            members = members.astype(np.uint32)
        return cls(members=members, starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @property
    def num_samples(self) -> int:
        return len(self.members)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each class, int64."""
        return np.diff(self.starts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StratifiedOrder:
    """Order of one epoch over `strata`. `at` computes one key per position, and a few for each class."""

    strata: Strata
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    @property
    def num_samples(self) -> int:
        return self.strata.num_samples

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Order.at`."""
        where = positions(start, stop, num_samples=self.num_samples)
        if start == stop:
            return where
        counts = self.strata.counts
        numbers = np.arange(len(counts))
        drawn = hashes(epoch_key(self.seed, self.epoch, purpose=_PHASES), numbers)
        phases = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        # N t of N samples, plus or minus one per class, have a key below t: these bounds enclose the range.
        slack = len(counts) + 1
        before = _members_below((start - slack) / self.num_samples, counts=counts, phases=phases)
        until = _members_below((stop + slack) / self.num_samples, counts=counts, phases=phases)
        near = until - before
        classes = np.repeat(numbers, near)
        # j in each class: before, ..., until - 1
        within = np.arange(len(classes)) - np.repeat(np.cumsum(near) - near, near) + before[classes]
        keys = (within + phases[classes]) / counts[classes]
        chosen = np.lexsort((classes, keys))[start - int(before.sum()) :][: stop - start]
        classes, within = classes[chosen], within[chosen]
        members = permute_groups(
            within,
            groups=classes,
            num_values=counts[classes],
            key=epoch_key(self.seed, self.epoch, purpose=_MEMBERS),
        )
        return self.strata.members[self.strata.starts[classes] + members].astype(np.int64)


def _members_below(
    key: float, *, counts: NDArray[np.int64], phases: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns the exact number of members of each class whose key is below `key`: int64, shape (classes,)."""
    guess = np.clip(np.ceil(key * counts - phases), 0, counts).astype(np.int64)
    # The product and the quotient are rounded differently: the guess may be off by one.
    guess -= (guess > 0) & ((guess - 1 + phases) / counts >= key)
    guess += (guess < counts) & ((guess + phases) / counts < key)
    return guess
