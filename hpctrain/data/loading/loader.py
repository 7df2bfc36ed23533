"""Batches of a dataset for one rank, which threads prepare in advance within a limit of memory.

    for batch in Loader(Dataset.open("digits/train"), global_batch=64).epoch(0):
        batch.fields["image"]

The global batches of an epoch depend only on order, seed, epoch and batch size. Each rank takes a contiguous part of
each global batch. The position in an epoch is counted in samples, so a run can resume with another number of ranks, or
another batch size. A loader never communicates between ranks, unless the dataset is collective (`CollectiveDataset`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.format.manifest import FieldSpec
from hpctrain.data.integrity.read_checker import BlockChecker, OnDamage, read_around_damage
from hpctrain.data.loading.batch import Batch, BatchMemory
from hpctrain.data.loading.prefetch import (
    ByteBound,
    EpochIterator,
    EpochPlan,
    InStep,
    MakingThreads,
    Prefetch,
    read_ahead_for,
)
from hpctrain.data.order.epoch_order import (
    BatchPlan,
    LastBatch,
    Order,
    PositionRange,
    ahead_for,
    num_batches,
    plan_batch,
)
from hpctrain.data.order.order_spec import OrderSpec, Sequential, Shuffled
from hpctrain.data.transforms.torch_dtypes import WIDENED, as_tensor, torch_dtype
from hpctrain.data.transforms.transform import TransformContext, TransformFunction
from hpctrain.data.transforms.worker_pool import build_transformer, transformed
from hpctrain.errors import DataError, RecipeError

# What each thread is doing for which batch, for the message about a batch that takes too long.


class InputWatch(Protocol):
    """Interface of a watchdog that ends the rank if a batch takes too long.

    `Session.loader` passes an `InputWatch` to its loader.
    """

    def during(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Returns a context in which the caller waits. `describe` returns in words what the caller waits for."""

    def making(self, what: str) -> AbstractContextManager[None]:
        """Returns a context for work of this thread that may hold Python's interpreter lock. `what` names the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    plan: BatchPlan
    text: str
    thread: int
    reads: bool
    since: float


@final
class InProgress:
    """Records which thread is making which batch, for messages about a batch that takes too long. Thread-safe.

    `where` takes the identifier of a thread and returns the process in which the thread's batch is transformed, in
    words, or "" if the thread itself transforms the batch. `watch` is informed of each step in this process.
    """

    def __init__(self, where: Callable[[int], str], *, watch: InputWatch | None = None) -> None:
        self._where = where
        self._watch = watch
        self._stages: dict[int, _Stage] = {}  # by thread, each of which changes its own entry

    @contextlib.contextmanager
    def stage(self, plan: BatchPlan, text: str, *, reads: bool) -> Iterator[None]:
        """Returns a context for work on the batch of `plan`, named by `text`. reads: True if samples are read in it."""
        thread = threading.get_ident()
        self._stages[thread] = _Stage(
            plan=plan, text=text, thread=thread, reads=reads, since=time.monotonic()
        )
        try:
            if self._watch is None or not (reads or self._where(thread) == ""):
                yield
                return
            what = (
                f"samples from {plan.start} of epoch {plan.epoch} on, {text} in thread "
                f"{threading.current_thread().name} ({_describe_indices(plan)})"
            )
            with self._watch.making(what):
                yield
        finally:
            del self._stages[thread]

    def describe(self, *, epoch: int, span: PositionRange) -> str:
        """Returns in words what is being done for the batch of the samples at positions `span` of an epoch.

        If no thread has begun that batch, the text says so, and says what is being done for other batches.
        """
        wanted = f"samples {span.start} to {span.stop - 1} of epoch {epoch}"
        stages = sorted(self._stages.copy().values(), key=lambda stage: stage.since)
        own = [stage for stage in stages if (stage.plan.epoch, stage.plan.start) == (epoch, span.start)]
        if own:
            return f"{wanted}: {self._text(own[0])}"
        return f"{wanted}, which are not begun; {self.describe_all()}"

    def describe_all(self) -> str:
        """Returns in words what the loader is doing for up to four batches; the one that takes longest comes first."""
        stages = sorted(self._stages.copy().values(), key=lambda stage: stage.since)
        texts = [
            f"samples from {stage.plan.start} of epoch {stage.plan.epoch} on: {self._text(stage)}"
            for stage in stages[:4]
        ]
        return "; ".join(texts) or "no batch is being made"

    def _text(self, stage: _Stage) -> str:
        where = "" if stage.reads else self._where(stage.thread)
        if not where:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            where = f"thread {names.get(stage.thread, stage.thread)}"
        waited_s = time.monotonic() - stage.since
        return f"{stage.text} for {waited_s:.0f} s in {where} ({_describe_indices(stage.plan)})"


def _describe_indices(plan: BatchPlan) -> str:
    indices = plan.indices
    numbers = ", ".join(map(str, indices[:4].tolist())) + (", ..." if len(indices) > 4 else "")
    return f"this rank's {len(indices)} samples have the indices {numbers}"


# Position in the data, saved as JSON values and valid for any number of ranks.


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """Position of a loader, saved as JSON values and valid for any number of ranks.

    `position` is the number of samples of the epoch that all ranks together have consumed. `order` is the name of the
    order in which samples are read (`OrderSpec.name`), and `num_samples` the number of samples of the dataset.
    """

    order: str
    num_samples: int
    seed: int
    epoch: int
    position: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> LoaderState:
        """Returns the state that `document`, a result of `as_json`, describes. Raises DataError for anything else."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            kind = str if field.name == "order" else int
            value: Any = document.get(field.name) if isinstance(document, Mapping) else None
            if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
                raise DataError(
                    f"this is not a state of a loader: the entry {field.name} is {value!r}, not "
                    f"{'a string' if kind is str else 'an integer of at least 0'}; pass what state_dict() returned"
                )
            values[field.name] = value
        return cls(**values)

    def check_fits(self, *, order: str, num_samples: int) -> None:
        """Raises DataError unless the state is of the order with the name `order`, and of `num_samples` samples."""
        if self.order != order:
            raise DataError(
                f"the state was saved with order {self.order!r}, this loader has {order!r}, in which the same position "
                "means another sample. Use the order of the state, or start the epoch again"
            )
        if self.num_samples != num_samples:
            raise DataError(
                f"the state was saved with {self.num_samples} samples, this dataset has {num_samples}: it is another "
                "dataset. Use the one that the state was saved with"
            )


# Batches of a dataset for one rank, prefetched by threads within a bound of bytes.


PREFETCH_BYTES = 64 << 20
MAX_BATCHES_AHEAD = 1024  # the bound in bytes counts only tensors


class Samples(Protocol):
    """Interface of a dataset that a loader can read: a `Dataset`, or an object of a class that the user has written.

    The object may also have the attributes of `ReadFlags`. A loader calls `gather` from several threads if the
    loader's `num_threads` is above 1, or if the dataset's `is_thread_safe` is true.
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def fields(self) -> Mapping[str, FieldSpec]: ...

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> Mapping[str, NDArray[Any]]:
        """Reads samples by index.

        Args:
            indices: Indices of the samples in the dataset: int64, shape (n,).
            out: Arrays to fill instead of new ones, by field name, for some or all fields.

        Returns:
            For each field an array of shape (n, *sample_shape).
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFlags:
    """Optional attributes of a dataset, in addition to those of `Samples`. A missing attribute has its default here.

    Attributes:
        is_thread_safe: True if several threads may call `gather` at once. The thread that waits for a batch then also
            makes batches.
        collective: True if `gather` is collective: all ranks then read the same batches in the same order.
        checker: Compares blocks of data with their hashes while the blocks are read; None: blocks are not checked.
    """

    is_thread_safe: bool = False
    collective: bool = False
    checker: BlockChecker | None = None

    @classmethod
    def of(cls, dataset: Samples) -> ReadFlags:
        # Not isinstance of a Protocol: since Python 3.12 it overlooks what a wrapper's __getattr__ passes on.
        return cls(**{f.name: getattr(dataset, f.name) for f in fields(cls) if hasattr(dataset, f.name)})


class Loader:
    """Makes the batches of one rank: an iterator per epoch. Not collective, unless the dataset is collective.

    Args:
        dataset: The samples.
        global_batch: Number of samples of all ranks together in one step. The numbers of samples per rank differ by
            at most one.
        rank: Index of this rank.
        num_ranks: Number of ranks.
        seed: Seed of the order and of the transform's random numbers; the same on every rank.
        shuffle: Whether to shuffle the samples, if `order` is None.
        order: Order of the samples, such as `Blocks` or `Weighted`; None: `Shuffled` or `Sequential`, by `shuffle`.
        last_batch: What to do with an incomplete global batch at the end of an epoch: "keep", "drop" or "pad".
        on_damage: What to do with samples in blocks that the dataset's checker finds damaged: "stop" or "skip".
        transform: Function that transforms the arrays of a batch, or its name "module:function"; see
            `hpctrain.data.transforms.transform`. None: batches are not transformed.
        workers: Number of processes that run the transform; 0: the loader's threads run it.
        prefetch_bytes: Maximum size in bytes of all batches that are ready or being made. One batch is always
            allowed, even if it is larger.
        num_threads: Number of threads that make batches; at least `workers` threads are used.
        pin_memory: True if batches are put into page-locked memory, so that copies to a GPU overlap with computation.
        watch: Watchdog that limits the time to wait for a batch, as in `Session.loader`; None: no limit.

    Raises:
        RecipeError: If the options do not fit together, or do not fit the number of ranks or the dataset.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: OrderSpec | None = None,
        last_batch: LastBatch | str = LastBatch.KEEP,
        on_damage: OnDamage | str = OnDamage.STOP,
        transform: str | TransformFunction | None = None,
        workers: int = 0,
        prefetch_bytes: int = PREFETCH_BYTES,
        num_threads: int = 1,
        pin_memory: bool = False,
        watch: InputWatch | None = None,
    ) -> None:
        self.dataset = dataset
        self.global_batch = global_batch
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        self.order: OrderSpec = order if order is not None else Shuffled() if shuffle else Sequential()
        self.last_batch = LastBatch(last_batch)
        self.on_damage = OnDamage(on_damage)
        self.num_threads = max(num_threads, workers)
        self.prefetch_bytes = prefetch_bytes
        self.wait_s = 0.0
        """Total time that the consumer has waited for batches, in seconds, over all epochs."""
        self.current_epoch = 0
        self.position = 0
        """Number of samples, over all ranks, that the current epoch has returned so far."""
        self._continues = False
        self._check()
        # Computed from the largest part of any rank, so that all ranks prefetch the same number of batches.
        self.batch_bytes = -(-global_batch // num_ranks) * sum(
            int(np.prod(spec.shape, dtype=np.int64)) * torch_dtype(spec.dtype).itemsize
            for spec in dataset.fields.values()
        )
        self.prefetch_batches = max(1, prefetch_bytes // max(1, self.batch_bytes))
        self._pin = pin_memory
        self._memory = BatchMemory(kept_bytes=prefetch_bytes)
        self._transformer = build_transformer(transform, workers=workers)
        self._watch = watch
        self._in_progress = InProgress(
            (lambda thread: "") if self._transformer is None else self._transformer.place, watch=watch
        )
        self._threads: list[MakingThreads] = []  # of each epoch whose threads have not all ended

    def _check(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise RecipeError(f"rank {self.rank} is not one of {self.num_ranks} ranks")
        if self.num_threads < 1:
            raise RecipeError(f"num_threads is {self.num_threads}: at least 1 is needed")
        if self.global_batch < self.num_ranks:
            raise RecipeError(
                f"a global batch of {self.global_batch} samples cannot be split over {self.num_ranks} ranks: "
                f"make it at least {self.num_ranks}, or start at most {max(1, self.global_batch)} ranks"
            )
        if self.batches_per_epoch == 0:
            raise RecipeError(
                f"a global batch of {self.global_batch} samples is never full with "
                f'{self.num_positions} samples: make it smaller, or set last_batch to "keep" or "pad"'
            )
        if self.on_damage is OnDamage.SKIP and self.checker is None:
            raise RecipeError(
                'on_damage is "skip", but nothing checks the data for damage: set check to "first-epoch" or "always"'
            )
        self._order(0)  # raises an error if the order does not fit the dataset

    @property
    def checker(self) -> BlockChecker | None:
        """The dataset's checker, which compares blocks with their hashes while reading; None if there is no checker."""
        return ReadFlags.of(self.dataset).checker

    @property
    def may_help(self) -> bool:
        """True if the thread that waits for batches may make batches itself.

        False if there is a transform, or if the dataset may not be used from two threads.
        """
        safe = self.num_threads > 1 or ReadFlags.of(self.dataset).is_thread_safe
        return self._transformer is None and safe

    def _order(self, epoch: int) -> Order:
        return self.order.for_epoch(epoch, num_samples=self.dataset.num_samples, seed=self.seed)

    @property
    def num_positions(self) -> int:
        """Number of samples per epoch, over all ranks: all samples of the dataset, except for `Weighted` orders."""
        return self.order.num_positions(num_samples=self.dataset.num_samples)

    @property
    def batches_per_epoch(self) -> int:
        return self.remaining_batches(start=0)

    def remaining_batches(self, *, start: int) -> int:
        """Returns the number of global batches from a position to the end of an epoch.

        Args:
            start: The position in the epoch, in samples over all ranks.
        """
        return num_batches(
            self.num_positions, global_batch=self.global_batch, last_batch=self.last_batch, start=start
        )

    def epoch(self, epoch: int = 0, *, start: int = 0, every: int = 1) -> EpochIterator:
        """Returns an iterator over this rank's batches of an epoch. The threads that make batches start at once.

        To stop before the last batch, close the iterator, or use a `with` block.

        Args:
            epoch: Number of the epoch, from 0.
            start: Position of the first batch: the number of samples of the epoch that all ranks together have
                consumed before.
            every: With the value n, every n-th batch is returned from `start` on, so that n readers share an epoch.

        Returns:
            The iterator.

        Raises:
            DataError: If the epoch has fewer samples than `start`.
        """
        if not 0 <= start <= self.num_positions:
            raise DataError(
                f"the run should resume at sample {start} of an epoch, but the epoch has "
                f"{self.num_positions} samples: was the dataset packed again since the checkpoint was written?"
            )
        self._await_unfinished()
        self.current_epoch, self.position = epoch, start
        self._continues = False
        plan = EpochPlan(
            order=self._order(epoch), start=start, every=every, global_batch=self.global_batch,
            num_batches=-(-self.remaining_batches(start=start) // every),
        )  # fmt: skip
        return EpochIterator(
            self._source(plan), num_batches=plan.num_batches, waited=self._add_wait, handed_out=self._move_to,
            watched=lambda number: self._waiting(
                lambda: self._in_progress.describe(epoch=epoch, span=plan.span(number))
            ),
            closed=self._say_unfinished,
        )  # fmt: skip

    def _waiting(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.during(describe)

    def _say_unfinished(self) -> None:
        """Prints a warning to stderr if threads are still making batches of an epoch that was ended early."""
        if any(threads.unfinished() for threads in self._threads):
            print(
                f"hpctrain: rank {self.rank} does not wait for batches that are still being made, and that nobody "
                f"needs: {self._in_progress.describe_all()}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _await_unfinished(self) -> None:
        """Waits until the threads of earlier epochs end. Otherwise too many threads might read the dataset at once."""
        for thread in [thread for threads in self._threads for thread in threads.unfinished()]:
            with self._waiting(
                lambda: f"the end of an earlier epoch's threads; {self._in_progress.describe_all()}"
            ):
                thread.join()
        self._threads = [threads for threads in self._threads if not threads.have_ended]

    def _source(self, plan: EpochPlan) -> Prefetch[Batch] | InStep[Batch]:
        """Returns an iterator over the batches of `plan`. Unless the dataset is collective, threads start at once."""
        read_ahead = read_ahead_for(self.dataset, plan.order, start=plan.start)
        order = ahead_for(plan.order, num_ranks=self.num_ranks)

        def make(number: int) -> Batch:
            span = plan.span(number)
            if read_ahead is not None:
                read_ahead.before(span)
            return self.load(order, span=span)

        if ReadFlags.of(self.dataset).collective:
            return InStep(make, num_items=plan.num_batches)
        source = Prefetch(
            make, num_items=plan.num_batches, depth=MAX_BATCHES_AHEAD, bound=self.prefetch_bound(),
            num_threads=self.num_threads, help_make=self.may_help,
        )  # fmt: skip
        self._threads.append(source.threads)
        return source

    def _add_wait(self, seconds: float) -> None:
        self.wait_s += seconds

    def _move_to(self, batch: Batch) -> None:
        """Sets the loader's position to the end of `batch`. Called just before `batch` is returned to the consumer."""
        self.position = batch.stop

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over epoch 0.

        After `load_state_dict`, iterates over the rest of the epoch of the state, or over the next epoch if no batch
        of that epoch remains.
        """
        if not self._continues:
            return iter(self.epoch(0))
        if self.remaining_batches(start=self.position) == 0:
            return iter(self.epoch(self.current_epoch + 1))
        return iter(self.epoch(self.current_epoch, start=self.position))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last returned batch, as JSON values that are the same on every rank."""
        return LoaderState(
            order=self.order.name,
            num_samples=self.dataset.num_samples,
            seed=self.seed,
            epoch=self.current_epoch,
            position=self.position,
        ).as_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes at a position from `state_dict`. The number of ranks and the batch size may have changed.

        The next `iter(loader)` begins at that position, with the seed of the state.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            DataError: If `state` is not such a state, or belongs to another order or another number of samples.
        """
        place = LoaderState.of_json(state)
        place.check_fits(order=self.order.name, num_samples=self.dataset.num_samples)
        if place.position > self.num_positions:
            raise DataError(
                f"the saved position {place.position} is beyond the end of the epoch, sample {self.num_positions}"
            )
        self.seed, self.current_epoch, self.position = place.seed, place.epoch, place.position
        self._continues = True

    def __len__(self) -> int:
        return self.batches_per_epoch

    def prefetch_bound(self) -> ByteBound[Batch]:
        """Returns the limit on prefetched bytes. With a transform the expected size of a batch is unknown at first."""
        copies = 0 if self._transformer is None else self._transformer.input_copies
        return ByteBound(
            max_bytes=self.prefetch_bytes,
            num_bytes=lambda batch: batch.num_bytes,
            expected_bytes=None if copies else self.batch_bytes,
            making_bytes=copies * self.batch_bytes,
        )

    def load(self, order: Order, *, span: PositionRange) -> Batch:
        """Makes this rank's part of one global batch. The loader's threads call this method once per batch.

        Args:
            order: Maps positions in the epoch to samples.
            span: The positions in the epoch that make up the global batch.

        Returns:
            The batch.
        """
        return self.read(
            plan_batch(
                order, span=span, global_batch=self.global_batch, last_batch=self.last_batch, rank=self.rank,
                num_ranks=self.num_ranks,
            )
        )  # fmt: skip

    def read(self, plan: BatchPlan) -> Batch:
        """Reads samples, applies the transform, and returns them as a batch.

        Args:
            plan: States which samples to read, and how many of them are padding.

        Returns:
            The batch.
        """
        checker = self.checker
        with self._in_progress.stage(plan, f"{type(self.dataset).__qualname__} has been read", reads=True):
            if checker is not None and self.on_damage is OnDamage.SKIP:
                plan, fields = read_around_damage(
                    plan,
                    read=self._tensors,
                    sound=checker.sound,
                    keep_length=self.last_batch is LastBatch.PAD,
                )
            else:
                fields = self._tensors(plan.indices)
        if self._transformer is not None:
            context = TransformContext(
                seed=self.seed, epoch=plan.epoch, start=plan.start, indices=plan.indices
            )
            text = f"the transform {self._transformer.name} has run"
            with self._in_progress.stage(plan, text, reads=False):
                fields = transformed(fields, by=self._transformer, context=context, pin_memory=self._pin)
        return Batch(
            fields=fields,
            epoch=plan.epoch,
            start=plan.start,
            num_samples=plan.num_samples,
            num_padded=plan.num_padded,
            num_skipped=plan.num_skipped,
            global_samples=plan.global_samples,
            indices=plan.indices,
        )

    def _tensors(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Reads the samples `indices`, and returns a tensor of shape (len(indices), *sample_shape) for each field."""
        # The input of a transform is not copied to the GPU, so it need not be pinned.
        pin = self._pin and self._transformer is None
        tensors, direct = {}, {}
        for name, spec in self.dataset.fields.items():
            if spec.dtype not in WIDENED:
                shape = (len(indices), *spec.shape)
                if pin:
                    tensors[name] = torch.empty(shape, dtype=torch_dtype(spec.dtype), pin_memory=True)
                else:
                    tensors[name] = self._memory.empty(shape, dtype=np.dtype(spec.dtype))
                direct[name] = tensors[name].numpy()
        arrays = self.dataset.gather(indices, out=direct)
        for name in self.dataset.fields:
            if name not in tensors:
                tensors[name] = as_tensor(np.asarray(arrays[name]), pin_memory=pin)
        return {name: tensors[name] for name in self.dataset.fields}
