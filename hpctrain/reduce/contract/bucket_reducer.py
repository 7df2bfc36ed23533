"""What sums a bucket over all ranks: the seam between the updater and the algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.reduce.contract.bucket_plan import Bucket

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A block of a global tensor that this rank holds, for a checkpoint. The whole tensor: all ranks hold it."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@runtime_checkable
class Chooser(Protocol):
    """A reducer that has chosen among ways whose sums differ in the last bits: a resumed run takes the same."""

    def choice_state(self) -> dict[str, Any]:
        """For a checkpoint: JSON, the same on every rank."""

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Choose as before, from the next plan on; the bytes of a bucket to plan with. Not collective."""


@runtime_checkable
class StepSums(Protocol):
    """A reducer that may do on its way what else takes another look at all gradients and a collective operation."""

    def keep_squares(self) -> None:
        """From the next plan on, square what is summed. Not collective."""

    def filled(self, number: int, num_elems: int) -> None:
        """The first `num_elems` elements of bucket `number` are there: its next reduction may begin with them.

        From then on they may change. Not collective, and a rank need not say it.
        """

    def scale_sums(self, factor: float) -> bool:
        """From now on until the next plan multiply what is summed by `factor`, the same on every rank.

        False, on every rank alike, where it cannot; then nothing is multiplied. Not collective.
        """

    def square(self) -> float | None:
        """Sum of the squares of all gradients as they were summed last: the same bits on every rank.

        None, on every rank alike, where it was not taken. Not collective.
        """

    def carry(self, numbers: Numbers) -> bool:
        """Sum a few numbers, shape (n,), over all ranks, in place, beside the next reduction of all buckets.

        Before any of these; done when all of them are. False, on every rank alike if n is the same, where it cannot;
        where it can, it knows `square` as well. Collective.
        """

    def sum_numbers(self, numbers: Numbers) -> Iterator[bool] | None:
        """Sum a few numbers, shape (n,), over all ranks, in place. Collective, and as `reduce` in turns.

        After `plan`, while nothing else is under way. The same bits on every rank. None where it cannot: on every rank
        alike, if n is the same.
        """


@runtime_checkable
class InBackground(Protocol):
    """A reducer some of whose reductions, once begun, are carried on by a thread outside Python."""

    def in_background(self, number: int) -> bool:
        """Whether bucket `number`'s reduction is; the same on every rank. Not collective.

        Its first `next` then does not wait for other ranks, and it is worth beginning within backward even where no
        core is free for a thread of ours.
        """


class BucketReducer(Protocol):
    """Sums buckets of gradients over all ranks, several at a time.

    Every rank plans the same buckets and reduces them in the same order.
    """

    @property
    def algorithm(self) -> str:
        """What runs, by its name in the recipe."""

    @property
    def wire(self) -> str:
        """What travels, by its name in the recipe."""

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        """Memory for each bucket: shape (bucket.numel,), bucket.dtype, zeroed, on `device`. Collective.

        A second call forgets the first one's buckets, and keeps what was fed back, by parameter. Raises
        BufferMismatch on every rank, naming the rank, unless all plan the same.
        """

    def reduce(self, number: int) -> Iterator[bool]:
        """Sum bucket `number` over all ranks, in place, in the memory that `plan` gave. Collective.

        A generator: each `next` goes as far as it can without waiting. It yields True when it got on, False
        when it waits for another rank; it ends when the bucket holds the sum, the same bits on every rank.
        Several may be under way; every rank begins them in the same order, but the turns they take after
        that differ between ranks. So a reducer of blocking collectives does all of them in the first `next`.
        """

    def settle(self, *, applied: bool, rescale: float) -> None:
        """The step is over, on all ranks alike: what was fed back counts only if it was applied.

        rescale: factor of the loss scale from this step to the next. Not collective.
        """

    def bytes_sent(self) -> int:
        """Payload bytes this rank has sent to other nodes since the reducer was made. Not collective."""

    def state(self) -> list[StateTensor]:
        """What a checkpoint must hold: errors fed back, low-rank factors. Not collective; may be empty."""

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Whole tensors of a checkpoint by name, also one of another number of ranks. After `plan`.

        What the checkpoint does not hold (another wire wrote it) begins as in a new run; names that are not
        this reducer's are passed over.
        """

    def close(self) -> None:
        """Give back memory and messages. Collective."""
