"""Adapters to `torch.utils.data`, for scripts that read shards through a DataLoader.

    loader = DataLoader(torch_map_dataset("images", fields=["image", "label"]), batch_size=64, shuffle=True)
    loader = DataLoader(torch_iterable_dataset("images", global_batch=64), batch_size=None)

The first DataLoader yields samples, in the order that its sampler chooses. The second yields the batches of a
`Loader`: its global batches are the same for any number of ranks, and its state can be saved. Both datasets may be
used with `num_workers`. Under MPI, worker processes need `multiprocessing_context="spawn"` before Python 3.14, and
`num_workers=0` is faster.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset, IterableDataset, get_worker_info

from hpctrain.data.loading.loader import Loader, LoaderState, Samples
from hpctrain.data.order.order_spec import Fixed, Sequential
from hpctrain.data.reading.dataset import Dataset, Verify
from hpctrain.data.transforms.torch_dtypes import as_tensor
from hpctrain.errors import DataError, UsageError

# Where the next iteration of a `TorchIterableDataset` begins, passed to DataLoader's workers through shared
# memory.
#
# With `persistent_workers=True` a worker keeps the copy of the dataset that it was started with: what is
# set later in the main process has to reach it in another way. Works for workers that are forked, spawned
# or come from a fork server.


# Places in the shared array of int64.
_VERSION, _EPOCH, _POSITION, _WORKERS, _BEGUN, _WARNED = range(6)
_NO_POSITION = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochStart:
    """Position at which an iteration over a `TorchIterableDataset` begins.

    `position` is the position of the first batch in the epoch, in samples over all ranks, if a saved state was loaded.
    It is None if the iteration begins at the start of the epoch. `num_workers` is the number of DataLoader workers that
    shared the epoch when the state was saved.
    """

    epoch: int = 0
    position: int | None = None
    num_workers: int = 1

    def first_position(self, number: int, *, num_workers: int, global_batch: int) -> int:
        """Returns the position in the epoch of the first batch of one DataLoader worker. Pure.

        `number` is the index of the worker, `num_workers` the number of workers, and `global_batch` the number of
        samples of all ranks in one batch.
        """
        if self.position is None:
            return number * global_batch
        # The position of a single reader is that of all workers; positions of several workers are each worker's own.
        return self.position if num_workers == self.num_workers else self.position + number * global_batch


class SharedEpoch:
    """Memory shared by the main process and DataLoader's workers, with the newest start of an epoch (`EpochStart`).

    The main process sets the start, and the workers read it.
    """

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
        """True in the process that created this object."""
        return self._owner == os.getpid()

    def set(self, start: EpochStart) -> None:
        """Tells the workers of this process that their next iteration begins at `start`.

        Call this only in the process that created this object.
        """
        self._values[_EPOCH] = start.epoch
        self._values[_POSITION] = _NO_POSITION if start.position is None else start.position
        self._values[_WORKERS] = start.num_workers
        self._seen += 1
        self._values[_VERSION] = self._seen  # last: a worker then finds the other values

    def changed(self) -> EpochStart | None:
        """Returns the newest `EpochStart`, if it was set since the last call in this process; else None.

        In a new worker the first call counts from the creation of the worker.
        """
        version, epoch, position, num_workers, *_ = self._values.tolist()
        if version == self._seen:
            return None
        self._seen = version
        return EpochStart(
            epoch=epoch, position=None if position == _NO_POSITION else position, num_workers=num_workers
        )

    def begin(self) -> None:
        """Records that a worker has begun to iterate from the newest `EpochStart`."""
        self._values[_BEGUN] = self._seen

    @property
    def has_begun(self) -> bool:
        """True if a worker has begun to iterate from the newest `EpochStart`."""
        return int(self._values[_BEGUN]) == self._seen

    def warn_of_repetition(self, epoch: int) -> None:
        """Prints a warning, once, that new DataLoader workers read an epoch again, in the same order.

        `epoch` is the number of the epoch.
        """
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


# Adapters to `torch.utils.data`.


Sample = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]


class _Source:
    """Opens a dataset once per process: open files are neither inherited through a fork nor pickled."""

    def __init__(self, source: Path | str | Samples) -> None:
        self._given = Path(source) if isinstance(source, (Path, str)) else source
        self._opened: Samples | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given, "_opened": None, "_pid": 0}

    def samples(self) -> Samples:
        """Returns the dataset, which the first call in this process opens. Raises DataError if that fails."""
        if not isinstance(self._given, Path):
            return self._given
        if self._opened is None or self._pid != os.getpid():
            # The main process checks the sizes of all files; its workers need not repeat that.
            verify = Verify.SIZES if get_worker_info() is None else Verify.OFF
            self._opened, self._pid = Dataset.open(self._given, verify=verify), os.getpid()
        return self._opened


class TorchMapDataset(TorchDataset[Sample]):
    """Map-style dataset for `torch.utils.data.DataLoader`: samples by index. Create it with `torch_map_dataset`."""

    def __init__(self, source: Path | str | Samples, *, fields: Sequence[str] | None = None) -> None:
        self._source = _Source(source)
        self._fields = None if fields is None else tuple(fields)
        known = list(self._source.samples().fields)
        unknown = [name for name in self._fields or () if name not in known]
        if unknown:
            raise UsageError(f"the dataset has no field {unknown[0]!r}; its fields are {', '.join(known)}")

    def __len__(self) -> int:
        return self._source.samples().num_samples

    def __getitem__(self, index: int) -> Sample:
        """Returns one sample. Raises IndexError if the index is out of range, DataError if reading fails."""
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range; number of samples: {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Returns several samples, which are read together. The samples are views of one array per field.

        DataLoader calls this method once per batch.
        """
        arrays = self._source.samples().gather(np.asarray(indices, dtype=np.int64))
        tensors = {name: as_tensor(array) for name, array in arrays.items()}
        if self._fields is None:
            return [{name: tensor[row] for name, tensor in tensors.items()} for row in range(len(indices))]
        return [tuple(tensors[name][row] for name in self._fields) for row in range(len(indices))]


class TorchIterableDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Iterable dataset of whole batches; each iteration is one epoch. Create it with `torch_iterable_dataset`."""

    def __init__(self, source: Path | str | Samples, **loader_options: Any) -> None:
        self._source = _Source(source)
        self._options = loader_options
        self._start = EpochStart()
        self._begun = False  # whether this process has begun an iteration at `_start`
        self._position: int | None = None  # where this worker's next batch begins; None: at its first
        self._iterated_by = 0  # process that has begun the last iteration
        self._shared = SharedEpoch()
        self._made: tuple[int, Loader] | None = None
        self._loader()  # raises an error now if the options do not fit

    def __getstate__(self) -> dict[str, Any]:
        self._own_shared()
        return {**self.__dict__, "_made": None}

    def _loader(self) -> Loader:
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), Loader(self._source.samples(), **self._options)
        return self._made[1]

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, summed over all DataLoader workers."""
        return self._loader().batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration.

        If a state of that epoch was just loaded, the position in the state is kept.

        Without this call each iteration in a process is the next epoch, even if the iteration before was left early.
        The call is needed if DataLoader starts new workers for each epoch (`persistent_workers=False`), since all new
        workers begin at the same place. The call also has an effect on workers that exist already
        (`persistent_workers=True`). If several DataLoaders share this dataset, take a batch from one DataLoader before
        you set the epoch for the next.

        Args:
            epoch: Number of the epoch, from 0.
        """
        is_restored = self._start.position is not None and not self._begun and not self._shared.has_begun
        if not (is_restored and epoch == self._start.epoch):
            self._begin_at(EpochStart(epoch=epoch))

    def _begin_at(self, start: EpochStart) -> None:
        self._start, self._begun, self._position = start, False, None
        if get_worker_info() is None:  # a worker sets its own start only
            self._own_shared()
            self._shared.set(start)

    def _own_shared(self) -> None:
        """Creates new memory to share with DataLoader workers, if another process created this dataset's memory.

        Does nothing in a worker. Other processes that received this dataset may start workers of their own.
        """
        if get_worker_info() is None and not self._shared.is_own:
            self._shared = SharedEpoch()
            self._shared.set(self._start)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields this worker's batches. Of W workers, worker w yields batches w, w + W, ..., as DataLoader expects."""
        loader = self._loader()
        number, count = _worker()
        # A new worker has a copy of the start that applied when it was made, which is that of its first iteration.
        is_new, self._iterated_by = self._iterated_by != os.getpid(), os.getpid()
        is_worker = get_worker_info() is not None
        set_since = self._shared.changed() if is_worker and not is_new else None
        if set_since is not None:
            self._start = set_since
        elif self._begun:
            self._start = EpochStart(epoch=self._start.epoch + 1)
        if is_worker and number == 0:
            if is_new and self._shared.has_begun and not isinstance(loader.order, (Sequential, Fixed)):
                self._shared.warn_of_repetition(self._start.epoch)
            self._shared.begin()
        self._begun, self._position = True, None
        first = self._start.first_position(number, num_workers=count, global_batch=loader.global_batch)
        return self._batches(loader, self._start, first=min(first, loader.num_positions), every=count)

    def _batches(
        self, loader: Loader, start: EpochStart, *, first: int, every: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        with loader.epoch(start.epoch, start=first, every=every) as batches:
            for batch in batches:
                if self._start is start:  # otherwise another iteration has begun
                    self._position = min(batch.start + every * loader.global_batch, loader.num_positions)
                yield batch.fields
        if self._start is start:
            self._start, self._begun, self._position = EpochStart(epoch=start.epoch + 1), False, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch, as JSON values. torchdata's StatefulDataLoader calls this method.

        If the workers of a plain DataLoader make the batches, the main process does not know the workers' position. In
        that case this method returns the start of the workers' epoch, with a warning.
        """
        if get_worker_info() is None and self._position is None and self._shared.has_begun:
            warnings.warn(
                f"the workers of a DataLoader make this dataset's batches, and state_dict() in the main process does "
                f"not know how far they are: it returns the beginning of epoch {self._start.epoch}. Use torchdata's "
                "StatefulDataLoader, or num_workers=0, for states within an epoch",
                stacklevel=2,
            )
        loader = self._loader()
        start, is_begun = self._start, self._position is not None
        place = LoaderState(
            order=loader.order.name, num_samples=loader.dataset.num_samples, seed=loader.seed, epoch=start.epoch,
            position=self._position or 0,
        )  # fmt: skip
        return {"place": place.as_json(), "begun": is_begun, "num_workers": _worker()[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes at the position of `state`.

        The number of ranks may have changed. The number of workers must be the same as when the state was saved. Any
        number of workers can resume a state that was saved without workers, or at the start of an epoch.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            DataError: If `state` is not such a state, or belongs to another order, seed, number of samples or number
                of workers.
        """
        if not isinstance(state, Mapping) or not {"place", "begun", "num_workers"} <= set(state):
            raise DataError("this is not a state of a dataset: pass what the dataset's state_dict() returned")
        loader = self._loader()
        place = LoaderState.of_json(state["place"])
        place.check_fits(order=loader.order.name, num_samples=loader.dataset.num_samples)
        if place.seed != loader.seed:
            raise DataError(
                f"the state was saved with seed {place.seed}, the dataset has seed {loader.seed}: "
                "use the seed of the state"
            )
        if state["begun"] and state["num_workers"] != _worker()[1]:
            raise DataError(
                f"the state was saved in the middle of an epoch by {state['num_workers']} workers, now there are "
                f"{_worker()[1]}: use the same number of workers"
            )
        self._begin_at(
            EpochStart(
                epoch=place.epoch,
                position=place.position if state["begun"] else None,
                num_workers=_worker()[1],
            )
        )


def torch_map_dataset(
    source: Path | str | Samples, *, fields: Sequence[str] | None = None
) -> TorchMapDataset:
    """Returns a map-style dataset for `torch.utils.data.DataLoader`. DataLoader's sampler chooses the sample order.

    Args:
        source: Directory of a dataset, or an opened dataset.
        fields: Names of the fields of a sample; None: all fields.

    Returns:
        The dataset. Without `fields` a sample is a dict of tensors, else a tuple of tensors in the order of `fields`.

    Raises:
        DataError: If the dataset cannot be opened.
        UsageError: If the dataset lacks one of `fields`.
    """
    return TorchMapDataset(source, fields=fields)


def torch_iterable_dataset(source: Path | str | Samples, **loader_options: Any) -> TorchIterableDataset:
    """Returns an iterable dataset of the batches of a `Loader`. Pass `batch_size=None` to DataLoader.

    Args:
        source: Directory of a dataset, or an opened dataset.
        **loader_options: Arguments of `hpctrain.data.Loader`, such as global_batch, rank, num_ranks, seed,
            transform.

    Returns:
        The dataset. Each batch is a dict of tensors by field name.

    Raises:
        DataError: If the dataset cannot be opened.
        RecipeError: If the loader's options do not fit together, or do not fit the dataset.
    """
    return TorchIterableDataset(source, **loader_options)


def _worker() -> tuple[int, int]:
    """Returns the index of this DataLoader worker and the number of workers; (0, 1) outside of a worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
