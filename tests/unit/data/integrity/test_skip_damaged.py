"""Batches without the damaged samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.data import (
    Damage,
    Dataset,
    EpochOrder,
    LastBatch,
    Loader,
    PositionRange,
)
from hpctrain.data.integrity.read_checker import CheckMode, DamagedData, read_around_damage
from hpctrain.data.order.epoch_order import plan_batch
from hpctrain.errors import DataError, RecipeError
from tests.unit.data.integrity.damaged_datasets import (
    IMAGE_BYTES,
    SAMPLES,
    SHARD_SAMPLES,
    flip_in,
    open_checked,
)


def damaged_samples(directory: Path) -> set[int]:
    """Samples 8 to 11 of the middle shard, and 0 to 3 of the last."""
    flip_in(directory, "image", shard=1, byte=9 * IMAGE_BYTES)
    flip_in(directory, "image", shard=2, byte=3)
    return {*range(SHARD_SAMPLES + 8, SHARD_SAMPLES + 12), *range(2 * SHARD_SAMPLES, 2 * SHARD_SAMPLES + 4)}


@pytest.mark.parametrize("mode", [CheckMode.FIRST_EPOCH, CheckMode.ALWAYS])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_batches_lack_the_damaged_samples_and_count_them(
    images: Path, mode: CheckMode, num_ranks: int
) -> None:
    whole = [
        list(Loader(Dataset.open(images), global_batch=16, rank=rank, num_ranks=num_ranks, seed=5).epoch(1))
        for rank in range(num_ranks)
    ]
    bad = damaged_samples(images)
    seen: list[int] = []
    skipped = 0
    for rank in range(num_ranks):
        loader = Loader(
            open_checked(images, mode), global_batch=16, rank=rank, num_ranks=num_ranks, seed=5,
            on_damage="skip", num_threads=2,
        )  # fmt: skip
        for batch, expected in zip(loader.epoch(1), whole[rank], strict=True):
            labels = [label for label in expected["label"].tolist() if label not in bad]
            assert batch["label"].tolist() == labels
            assert (batch.num_samples, len(batch["image"])) == (len(labels), len(labels))
            assert batch.num_samples + batch.num_skipped == expected.num_samples
            assert (batch.start, batch.global_samples) == (expected.start, expected.global_samples)
            seen += labels
            skipped += batch.num_skipped
        assert loader.position == SAMPLES
    assert sorted(seen) == [sample for sample in range(SAMPLES) if sample not in bad]
    assert skipped == len(bad)


def test_a_batch_that_is_filled_up_keeps_its_length(images: Path) -> None:
    bad = damaged_samples(images)
    loader = Loader(open_checked(images), global_batch=16, seed=5, last_batch="pad", on_damage="skip")
    seen: list[int] = []
    for batch in loader.epoch(0):
        assert len(batch["label"]) == 16 == batch.num_samples + batch.num_padded
        assert not bad & set(batch["label"].tolist())
        seen += batch.real()["label"].tolist()
    assert sorted(seen) == [sample for sample in range(SAMPLES) if sample not in bad]


def test_a_batch_of_damaged_samples_only_is_empty(images: Path) -> None:
    bad = damaged_samples(images)
    first = min(bad)
    loader = Loader(open_checked(images), global_batch=2, shuffle=False, on_damage="skip", last_batch="pad")
    with loader.epoch(0, start=first) as batches:
        batch = next(batches)
    assert (batch.num_samples, batch.num_skipped, batch.weight, batch["image"].shape) == (
        0,
        2,
        0.0,
        (0, 16, 16),
    )


def test_weights_of_what_is_left_add_up_to_one(images: Path) -> None:
    batch = Loader(Dataset.open(images), global_batch=16, shuffle=False).epoch(0).__next__()
    left = [
        replace(batch.split(2)[0], num_samples=5, num_skipped=3, global_skipped=4),
        replace(batch.split(2)[1], num_samples=7, num_skipped=1, global_skipped=4),
    ]
    assert sum(part.weight for part in left) == pytest.approx(1)
    assert sum(part.weight for half in left for part in half.split(3)) == pytest.approx(1)


def test_damage_that_comes_and_goes_does_not_go_round_for_ever(images: Path) -> None:
    loader = Loader(open_checked(images), global_batch=4, on_damage="skip")
    plan = plan_batch(
        EpochOrder(num_samples=SAMPLES), span=PositionRange(0, 4), global_batch=4, last_batch=LastBatch.KEEP, rank=0,
        num_ranks=1,
    )  # fmt: skip
    assert loader.checker is not None
    damage = Damage(
        shard="shard-00000.h5", field="image", first_sample=0, last_sample=3, reason="it seems so"
    )

    def read(indices: object) -> None:
        raise DamagedData(damage, directory=images)

    with pytest.raises(DamagedData, match="it seems so"):
        read_around_damage(plan, read=read, sound=loader.checker.sound, keep_length=False)


def test_a_shard_that_disappears_during_an_epoch_ends_it_with_an_error_that_names_the_file(
    images: Path,
) -> None:
    loader = Loader(open_checked(images), global_batch=10, shuffle=False, on_damage="skip", prefetch_bytes=1)
    with loader.epoch(0) as batches:
        next(batches)
        (images / "shard-00002.h5").unlink()
        with pytest.raises(DataError, match=r"shard-00002.h5 .*(missing|No such file)") as caught:
            list(batches)
    assert not isinstance(caught.value, DamagedData)


def test_on_damage_skip_is_refused_for_a_dataset_without_a_checker(images: Path) -> None:
    with pytest.raises(RecipeError, match="nothing checks the data for damage"):
        Loader(Dataset.open(images), global_batch=4, on_damage="skip")
