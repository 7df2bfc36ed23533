"""Parts of a common order are what ranks would have, over the ends of epochs, and hold each sample once per epoch."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data import FieldSpec, Loader, SharedOrder
from hpctrain.errors import UsageError


class Numbers:
    """Samples that are their own indices."""

    is_thread_safe = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.fields = {"x": FieldSpec(dtype="int64", shape=())}

    def gather(self, indices, *, out=None):  # type: ignore[no-untyped-def]
        values = {"x": np.asarray(indices, dtype=np.int64)}
        if out and "x" in out:
            out["x"][...] = values["x"]
            return out
        return values


def loader_of(num_samples: int, *, rank: int = 0, num_ranks: int = 1, last_batch: str = "keep") -> Loader:
    return Loader(
        Numbers(num_samples), global_batch=8, rank=rank, num_ranks=num_ranks, seed=3, last_batch=last_batch
    )


@pytest.mark.parametrize("last_batch", ["keep", "drop", "pad"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 8, 19, 29])
def test_parts_are_the_batches_of_ranks_from_a_position_on(
    last_batch: str, num_parts: int, start: int
) -> None:
    num_samples, epoch = 29, 2
    expected = []
    for rank in range(num_parts):
        loader = loader_of(num_samples, rank=rank, num_ranks=num_parts, last_batch=last_batch)
        of_rank = (
            list(loader.epoch(epoch, start=start))
            + list(loader.epoch(epoch + 1))
            + list(loader.epoch(epoch + 2))
        )
        expected.append(of_rank)
    order = SharedOrder(
        loader_of(num_samples, last_batch=last_batch), epoch=epoch, start=start, num_parts=num_parts
    )
    samples = 0
    for number in range(len(expected[0])):
        for part in range(num_parts):
            found, wanted = order.read(number, part=part), expected[part][number]
            assert found["x"].tolist() == wanted["x"].tolist()
            assert (found.epoch, found.start, found.weight) == (wanted.epoch, wanted.start, wanted.weight)
        samples += expected[0][number].global_samples
        after, last = order.after(number + 1), expected[0][number]
        assert (after.epoch, after.start, after.samples) == (last.epoch, last.stop, samples)


def test_each_sample_is_in_one_part_of_each_epoch() -> None:
    order = SharedOrder(loader_of(29), epoch=0, start=0, num_parts=3)
    batches = [order.read(number, part=part) for number in range(8) for part in range(3)]
    for epoch in (0, 1):
        used = [int(sample) for batch in batches if batch.epoch == epoch for sample in batch["x"]]
        assert sorted(used) == list(range(29))


def test_loaders_that_need_all_ranks_for_a_batch_are_refused() -> None:
    dataset = Numbers(29)
    dataset.collective = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="io = 'collective'"):
        SharedOrder(Loader(dataset, global_batch=8), epoch=0, start=0, num_parts=2)
    with pytest.raises(UsageError, match="make it at least 9"):
        SharedOrder(loader_of(29), epoch=0, start=0, num_parts=9)
