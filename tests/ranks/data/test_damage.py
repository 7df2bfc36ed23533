"""Damaged blocks end a run, or are left out of it, on all ranks alike, and the loss is right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import EpochOrder, pack_arrays, read_manifest
from hpctrain.train import derive_seed
from tests.ranks.data import damage_cases
from tests.ranks.train.training_cases import GLOBAL_BATCH, train
from tests.ranks_launcher import run_ranks
from tests.unit.data.integrity.test_verify import flip_bit

pytestmark = pytest.mark.launches

NUM_SAMPLES = 1438
SHARD_SAMPLES = 500
BLOCK_SAMPLES = 16
STEPS = 32


def damage_block(directory: Path, sample: int) -> list[int]:
    """Flip a bit of the image of `sample`; returns the samples of its block."""
    shard, row = divmod(sample, SHARD_SAMPLES)
    entry = read_manifest(directory).shards[shard]
    offset = entry.fields["image"].offset
    assert offset is not None
    flip_bit(directory / entry.file, offset=offset + 256 * row + 100)
    first = row // BLOCK_SAMPLES * BLOCK_SAMPLES
    return [shard * SHARD_SAMPLES + r for r in range(first, min(first + BLOCK_SAMPLES, entry.samples))]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("damage")
    images, labels = load_digits(return_X_y=True)
    fields = {
        "image": images[:NUM_SAMPLES].reshape(-1, 1, 8, 8).astype(np.float32),
        "label": labels[:NUM_SAMPLES].astype(np.int64),
        "id": np.arange(NUM_SAMPLES),
    }
    pack_arrays(where / "data", fields, shard_samples=SHARD_SAMPLES, block_bytes=256 * BLOCK_SAMPLES)
    return where


@pytest.fixture(scope="module")
def bad(where: Path) -> list[int]:
    """Samples of three damaged blocks, over two shards."""
    shutil.copytree(where / "data", where / "damaged")
    return [
        sample for hit in (3, 700, 702 + BLOCK_SAMPLES) for sample in damage_block(where / "damaged", hit)
    ]


@pytest.fixture(scope="module")
def late(where: Path) -> int:
    """Damage a block that the first epoch comes to as late as possible; the step that meets it, from 1."""
    order = EpochOrder(num_samples=NUM_SAMPLES, seed=derive_seed(5, "order"))
    step_of = np.empty(NUM_SAMPLES, dtype=np.int64)
    step_of[order.at(0, NUM_SAMPLES)] = np.arange(NUM_SAMPLES) // GLOBAL_BATCH + 1
    first = [int(step_of[start : start + BLOCK_SAMPLES].min()) for start in range(0, 496, BLOCK_SAMPLES)]
    shutil.copytree(where / "data", where / "late")
    damage_block(where / "late", int(np.argmax(first)) * BLOCK_SAMPLES)
    return max(first)


@pytest.fixture(scope="module")
def ranks(where: Path, bad: list[int], late: int) -> list[dict[str, Any]]:
    return run_ranks(3, damage_cases.everything, str(where)).outputs


def test_skipping_ranks_learn_what_one_rank_learns_from_the_sound_samples(
    ranks: list[dict[str, Any]], where: Path, bad: list[int]
) -> None:
    task = damage_cases.Choosy(bad)
    options = {**damage_cases.CHECKED, "data": {}}
    alone = train(SerialWorld(), where, "alone", task=task, **options)["losses"]
    assert len(alone) == STEPS
    assert alone[-1] < 0.8 * alone[0]  # it did learn
    for rank in ranks:
        assert rank["skip"]["losses"] == pytest.approx(alone, rel=1e-10)
    assert len({rank["skip"]["fingerprint"] for rank in ranks}) == 1


def test_skipped_samples_are_counted_in_metrics_and_summary(
    ranks: list[dict[str, Any]], bad: list[int]
) -> None:
    seen = [sample for rank in ranks for sample in rank["skip"]["seen"]]
    assert not set(seen) & set(bad)
    skipped = ranks[0]["skip"]["skipped"]
    assert len(seen) + sum(skipped) == NUM_SAMPLES + (STEPS - 29) * GLOBAL_BATCH
    assert sum(skipped[:29]) == len(bad)  # the whole first epoch
    for rank in ranks:
        assert rank["skip"]["skipped"] == skipped
        assert rank["skip"]["summary"]["skipped_samples"] == sum(skipped)
        assert 0.3 < rank["skip"]["summary"]["quality"]["accuracy"] <= 1
    reported = {(d["shard"], d["first_sample"]) for rank in ranks for d in rank["skip"]["damage"]}
    assert reported == {("shard-00000.h5", 0), ("shard-00001.h5", 192), ("shard-00001.h5", 208)}


def test_stopping_at_damage_ends_every_rank_with_the_same_words(
    ranks: list[dict[str, Any]], late: int
) -> None:
    (message,) = {rank["stop"]["message"] for rank in ranks}
    assert message.startswith("agreed: ")
    assert "shard-00000.h5, field 'image', samples " in message
    assert f"The state after step {late - 1} is saved" in message
    assert {rank["stop"]["steps"] for rank in ranks} == {late - 1}
    assert late > 3


def test_with_the_shard_restored_the_run_goes_on_to_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["stop"]["losses"] == rank["stop"]["whole_losses"]
        assert rank["stop"]["resumed"] == rank["stop"]["whole"]
