"""Batches of a dataset for one rank, prepared ahead in threads, with bounded memory.

    for batch in Loader(Dataset.open("digits/train"), global_batch=64).epoch(0):
        batch.fields["image"]

The global batches of an epoch depend on order, seed, epoch and batch size only; a rank takes its contiguous
part of each. The place in an epoch is counted in samples, so a run can go on from it with another number of
ranks, or another batch size. Never communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.format.manifest import FieldSpec
from hpctrain.data.integrity.read_checker import BlockChecker, OnDamage
from hpctrain.data.integrity.skip_damaged import read_around_damage
from hpctrain.data.loading.batch import Batch
from hpctrain.data.loading.block_readahead import read_ahead_for
from hpctrain.data.loading.buffer_pool import BatchMemory
from hpctrain.data.loading.epoch_iterator import Batches, EpochPlan
from hpctrain.data.loading.loader_state import LoaderState
from hpctrain.data.loading.lockstep import InStep
from hpctrain.data.loading.prefetch import ByteBound, Prefetch
from hpctrain.data.order.batch_plan import BatchPlan, plan_batch
from hpctrain.data.order.cached_order import ahead_for
from hpctrain.data.order.epoch_order import LastBatch, Order, Span, num_batches
from hpctrain.data.order.order_spec import OrderSpec, Sequential, Shuffled
from hpctrain.data.transforms.torch_dtypes import WIDENED, as_tensor, torch_dtype
from hpctrain.data.transforms.transform import TransformContext, TransformFunction
from hpctrain.data.transforms.transformer import build_transformer, transformed
from hpctrain.errors import DataError, RecipeError

PREFETCH_BYTES = 64 << 20
MAX_BATCHES_AHEAD = 1024  # the bound in bytes counts only tensors


class Samples(Protocol):
    """What a loader reads from: `hpctrain.data.Dataset`, or something of the user's.

    With `num_threads` above 1 `gather` is called from several threads; also with 1, by the loader's thread and the one
    that waits, if it has an attribute `is_thread_safe` that is true.
    """

    @property
    def num_samples(self) -> int: ...

    @property
    def fields(self) -> Mapping[str, FieldSpec]: ...

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> Mapping[str, NDArray[Any]]:
        """Field -> array of shape (len(indices), *sample_shape); arrays given in `out` are filled."""


class Loader:
    """Makes the iterators of epochs. One loader serves one rank.

    global_batch: samples over all ranks in one step; the ranks' parts differ by at most one.
    order: which sample when, see `hpctrain.data.order.order_spec`; `shuffle` is short for the two simplest ones.
    last_batch: keep or drop the samples at the end of an epoch that fill no whole global batch, or fill it up.
    on_damage: what becomes of samples in blocks that the dataset's checker finds damaged.
    transform: a function over the arrays of a batch, or its name "module:function", see
    `hpctrain.data.transforms.transform`. workers: processes that do it; 0: the threads do.
    prefetch_bytes: batches that are ready or being made ahead take at most this, but at least one is.
    num_threads: threads that make batches; at least one for each worker.
    pin_memory: put batches into page-locked memory, from which copies to a GPU overlap with its work.
    Raises RecipeError for a batch that cannot be split over the ranks, or that the dataset cannot fill.
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
        """Seconds that the consumer waited for a batch, over all epochs."""
        self.current_epoch = 0
        self.position = 0
        """Samples of the current epoch, over all ranks, in the batches handed out so far."""
        self._goes_on = False
        self._check()
        # The largest part that a rank gets decides: every rank prefetches alike.
        self.batch_bytes = -(-global_batch // num_ranks) * sum(
            int(np.prod(spec.shape, dtype=np.int64)) * torch_dtype(spec.dtype).itemsize
            for spec in dataset.fields.values()
        )
        self.prefetch_batches = max(1, prefetch_bytes // max(1, self.batch_bytes))
        self._pin = pin_memory
        self._memory = BatchMemory(kept_bytes=prefetch_bytes)
        self._transformer = build_transformer(transform, workers=workers)

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
                f"{self.num_positions} samples: make it smaller, or keep the last batch"
            )
        if self.on_damage is OnDamage.SKIP and self.checker is None:
            raise RecipeError(
                'damaged samples are to be skipped, but nothing looks for them: set check to "first-epoch" or "always"'
            )
        self._order(0)  # raises where the order does not fit the dataset

    @property
    def checker(self) -> BlockChecker | None:
        """What compares the dataset's blocks with their hashes while reading, if anything does."""
        return getattr(self.dataset, "checker", None)

    @property
    def may_help(self) -> bool:
        """Whether the thread that waits for batches may make some: not where code of the user's expects one thread."""
        safe = self.num_threads > 1 or getattr(self.dataset, "is_thread_safe", False)
        return self._transformer is None and safe

    def _order(self, epoch: int) -> Order:
        return self.order.for_epoch(epoch, num_samples=self.dataset.num_samples, seed=self.seed)

    @property
    def num_positions(self) -> int:
        """Length of an epoch, in samples over all ranks: the dataset's, but for orders that draw."""
        return self.order.num_positions(num_samples=self.dataset.num_samples)

    @property
    def batches_per_epoch(self) -> int:
        return self.remaining_batches(start=0)

    def remaining_batches(self, *, start: int) -> int:
        """Global batches from position `start` (in samples) to the end of an epoch."""
        return num_batches(
            self.num_positions, global_batch=self.global_batch, last_batch=self.last_batch, start=start
        )

    def epoch(self, epoch: int = 0, *, start: int = 0, every: int = 1) -> Batches:
        """This rank's batches of an epoch from position `start` on, the samples already consumed there.

        every: n takes each n-th batch only, the one at `start` first: n readers share an epoch so.
        The threads start at once. To end before the last batch, close the iterator, or use a `with` block.
        Raises DataError if the epoch has fewer samples than `start`.
        """
        if not 0 <= start <= self.num_positions:
            raise DataError(
                f"a run is to go on at sample {start} of an epoch, the dataset has "
                f"{self.num_positions}: was it packed again since the checkpoint was written?"
            )
        self.current_epoch, self.position = epoch, start
        self._goes_on = False
        plan = EpochPlan(
            order=self._order(epoch), start=start, every=every, global_batch=self.global_batch,
            num_batches=-(-self.remaining_batches(start=start) // every),
        )  # fmt: skip
        return Batches(
            self._source(plan), num_batches=plan.num_batches, waited=self._add_wait, handed_out=self._move_to
        )

    def _source(self, plan: EpochPlan) -> Prefetch[Batch] | InStep[Batch]:
        """Returns what makes the batches of `plan`, one after another; its threads start at once."""
        read_ahead = read_ahead_for(self.dataset, plan.order, start=plan.start)
        order = ahead_for(plan.order, num_ranks=self.num_ranks)

        def make(number: int) -> Batch:
            span = plan.span(number)
            if read_ahead is not None:
                read_ahead.before(span)
            return self.load(order, span=span)

        if getattr(self.dataset, "collective", False):
            # All ranks read together: none may be ahead of the others, or left alone with a batch to read.
            return InStep(make, num_items=plan.num_batches)
        return Prefetch(
            make, num_items=plan.num_batches, depth=MAX_BATCHES_AHEAD, bound=self.prefetch_bound(),
            num_threads=self.num_threads, help_make=self.may_help,
        )  # fmt: skip

    def _add_wait(self, seconds: float) -> None:
        self.wait_s += seconds

    def _move_to(self, batch: Batch) -> None:
        """The position after `batch`, which is handed out."""
        self.position = batch.stop

    def __iter__(self) -> Iterator[Batch]:
        """Epoch 0, or what follows the place that `load_state_dict` set."""
        if not self._goes_on:
            return iter(self.epoch(0))
        if self.remaining_batches(start=self.position) == 0:
            return iter(self.epoch(self.current_epoch + 1))
        return iter(self.epoch(self.current_epoch, start=self.position))

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch handed out, as plain JSON: the same on every rank."""
        return LoaderState(
            order=self.order.name,
            num_samples=self.dataset.num_samples,
            seed=self.seed,
            epoch=self.current_epoch,
            position=self.position,
        ).as_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a place that `state_dict` told, of a loader with any number of ranks and any batch size.

        The next `iter(loader)` begins there; the seed becomes the place's. Raises DataError for what is no
        such state, or one of another order or another number of samples.
        """
        place = LoaderState.of_json(state)
        place.check_fits(order=self.order.name, num_samples=self.dataset.num_samples)
        if place.position > self.num_positions:
            raise DataError(f"the saved position {place.position} is behind the epoch's {self.num_positions}")
        self.seed, self.current_epoch, self.position = place.seed, place.epoch, place.position
        self._goes_on = True

    def __len__(self) -> int:
        return self.batches_per_epoch

    def prefetch_bound(self) -> ByteBound[Batch]:
        """What may be ready or being made: of transformed batches the size is known once one is made."""
        copies = 0 if self._transformer is None else self._transformer.input_copies
        return ByteBound(
            max_bytes=self.prefetch_bytes,
            num_bytes=lambda batch: batch.num_bytes,
            expected_bytes=None if copies else self.batch_bytes,
            making_bytes=copies * self.batch_bytes,
        )

    def load(self, order: Order, *, span: Span) -> Batch:
        """Read this rank's part of the global batch at positions `span`; the threads do this a batch."""
        return self.read(
            plan_batch(
                order, span=span, global_batch=self.global_batch, last_batch=self.last_batch, rank=self.rank,
                num_ranks=self.num_ranks,
            )
        )  # fmt: skip

    def read(self, plan: BatchPlan) -> Batch:
        """Gather a plan's samples into tensors."""
        checker = self.checker
        if checker is not None and self.on_damage is OnDamage.SKIP:
            plan, fields = read_around_damage(
                plan, read=self._tensors, sound=checker.sound, keep_length=self.last_batch is LastBatch.PAD
            )
        else:
            fields = self._tensors(plan.indices)
        if self._transformer is not None:
            context = TransformContext(
                seed=self.seed, epoch=plan.epoch, start=plan.start, indices=plan.indices
            )
            fields = transformed(fields, by=self._transformer, context=context, pin_memory=self._pin)
        return Batch(
            fields=fields,
            epoch=plan.epoch,
            start=plan.start,
            num_samples=plan.num_samples,
            num_padded=plan.num_padded,
            num_skipped=plan.num_skipped,
            global_samples=plan.global_samples,
        )

    def _tensors(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Field -> tensor of shape (len(indices), *sample_shape)."""
        # What a transform is given is not what is copied to the GPU.
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
