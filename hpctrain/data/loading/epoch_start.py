"""Where the next iteration of a `TorchIterableDataset` begins, told to DataLoader's workers through shared memory.

With `persistent_workers=True` a worker keeps the copy of the dataset that it was started with: what is set later in the
main process has to reach it in another way. Works for workers that are forked, spawned or come from a fork server.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

# Places in the shared array of int64.
_VERSION, _EPOCH, _POSITION, _WORKERS, _BEGUN, _WARNED = range(6)
_NO_POSITION = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochStart:
    """Where an iteration begins.

    position: of the first batch, in samples over all ranks, from a loaded state; None: the beginning of the epoch.
    num_workers: how many workers shared the epoch when the state was saved.
    """

    epoch: int = 0
    position: int | None = None
    num_workers: int = 1

    def first_position(self, number: int, *, num_workers: int, global_batch: int) -> int:
        """Returns the position of the first batch of worker `number`. Pure."""
        if self.position is None:
            return number * global_batch
        # A state of one reader is the position of all; those of several workers are each worker's own.
        return self.position if num_workers == self.num_workers else self.position + number * global_batch


class SharedEpoch:
    """The start that the main process has set last, in memory shared with its workers."""

    def __init__(self) -> None:
        self._values = _shared(torch.tensor([0, 0, _NO_POSITION, 1, _NO_POSITION, 0]))
        self._owner = os.getpid()
        self._seen = 0

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._values.is_shared():  # a copy that was not made for a worker
            self._values, self._owner = _shared(self._values), os.getpid()

    @property
    def is_own(self) -> bool:
        """True in the process that has made it."""
        return self._owner == os.getpid()

    def set(self, start: EpochStart) -> None:
        """Publishes a start to this process's workers. For the process that has made this object."""
        self._values[_EPOCH] = start.epoch
        self._values[_POSITION] = _NO_POSITION if start.position is None else start.position
        self._values[_WORKERS] = start.num_workers
        self._seen += 1
        self._values[_VERSION] = self._seen  # last: a worker then finds the other values

    def changed(self) -> EpochStart | None:
        """Returns the start that was set since the last call, or since this worker was made; None if none was."""
        version, epoch, position, num_workers, *_ = self._values.tolist()
        if version == self._seen:
            return None
        self._seen = version
        return EpochStart(
            epoch=epoch, position=None if position == _NO_POSITION else position, num_workers=num_workers
        )

    def begin(self) -> None:
        """Notes that a worker has begun an iteration with the newest start."""
        self._values[_BEGUN] = self._seen

    @property
    def has_begun(self) -> bool:
        """True if a worker has begun an iteration with the newest start."""
        return int(self._values[_BEGUN]) == self._seen

    def warn_of_repetition(self, epoch: int) -> None:
        """Warns once, in a new worker, that it begins where workers before it have begun."""
        if not int(self._values[_WARNED]):
            self._values[_WARNED] = 1
            print(
                f"hpctrain: new workers of a DataLoader read epoch {epoch} again, in the same order: call set_epoch "
                "before each epoch, or use persistent_workers=True",
                file=sys.stderr,
                flush=True,
            )


def _shared(values: torch.Tensor) -> torch.Tensor:
    try:
        return values.share_memory_()
    except RuntimeError:  # no /dev/shm: then DataLoader's workers cannot return batches either
        return values
