"""The loader and `hpctrain data verify` on real ranks."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.collectives.agreement import all_gather_json
from hpctrain.data import Dataset, EpochOrder, Loader, pack_arrays, read_manifest
from tests.ranks_launcher import run_command, run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.cold]
NUM_SAMPLES, BATCH = 101, 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    fields = {"image": np.arange(NUM_SAMPLES * 64, dtype=np.int32).reshape(NUM_SAMPLES, 8, 8)}
    pack_arrays(directory, {**fields, "label": np.arange(NUM_SAMPLES)}, shard_samples=20, block_bytes=512)
    return directory


# Numbers of ranks: what reads the beginning of an epoch, and what reads the rest of it.
CHANGES = [(4, 3), (1, 2)]


def read_in_two_parts(world: Any, directory: str) -> list[list[dict[str, Any] | None]]:
    """Both parts of each of CHANGES, read by the first ranks of `world`. None on ranks that do not take part."""
    found = []
    for before, after in CHANGES:
        parts: list[dict[str, Any] | None] = []
        for num_ranks, start, steps in ((before, 0, 3), (after, 3 * BATCH, 1000)):
            group = world.split([range(num_ranks)])
            parts.append(None if group is None else read_epoch(group, directory, start, steps))
            world.barrier()
        found.append(parts)
    return found


def read_epoch(world: Any, directory: str, start: int, steps: int) -> dict[str, Any]:
    """`steps` batches from `start` on: the labels of each global batch, and the place after them."""
    loader = Loader(
        Dataset.open(directory), global_batch=BATCH, rank=world.rank, num_ranks=world.num_ranks, seed=9
    )
    mine = []
    with loader.epoch(1, start=start) as batches:
        for batch in itertools.islice(batches, steps):
            assert bool((batch["image"][:, 0, 0] == 64 * batch["label"]).all())
            mine.append(batch["label"].tolist())
    parts = all_gather_json(world, mine)
    return {
        "batches": [list(itertools.chain(*part)) for part in zip(*parts, strict=True)],
        "counts": [sum(len(batch) for batch in part) for part in parts],
        "position": loader.position,
    }


def test_an_interrupted_epoch_goes_on_with_just_the_remaining_samples_on_other_ranks(dataset: Path) -> None:
    outputs = run_ranks(4, read_in_two_parts, str(dataset)).outputs
    order = EpochOrder(num_samples=NUM_SAMPLES, seed=9, epoch=1).at(0, NUM_SAMPLES).tolist()
    expected = [order[k : k + BATCH] for k in range(0, NUM_SAMPLES, BATCH)]
    for number, (before, after) in enumerate(CHANGES):
        first, rest = outputs[0][number]
        for part, (found, num_ranks) in enumerate(((first, before), (rest, after))):
            assert [output[number][part] for output in outputs] == [found] * num_ranks + [None] * (
                4 - num_ranks
            )
            assert len(found["counts"]) == num_ranks
        assert first["position"] == 3 * BATCH
        assert first["batches"] + rest["batches"] == expected
        assert rest["position"] == NUM_SAMPLES
        # Balanced: no rank has more than one sample per step above another.
        assert max(rest["counts"]) - min(rest["counts"]) <= len(rest["batches"])


def verify(num_ranks: int | None, directory: Path, *options: str, expect: int) -> Any:
    command = [sys.executable, "-m", "hpctrain.cli.main", "data", "verify", str(directory), *options]
    return run_command(num_ranks, command, expect=expect)


def test_verify_on_three_ranks_reports_once_what_one_rank_reports(dataset: Path, tmp_path: Path) -> None:
    whole = verify(3, dataset, "--json", expect=0)
    assert json.loads(whole.stdout) == {"damaged": False, "datasets": {str(dataset): []}}
    for shard in (0, 3):
        entry = read_manifest(dataset).shards[shard]
        for byte in (3, 2600):
            descriptor = os.open(dataset / entry.file, os.O_RDWR)
            place = entry.fields["image"].offset + byte
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 1]), place)
            os.close(descriptor)
    alone = verify(None, dataset, "--json", expect=3)
    together = verify(3, dataset, "--json", expect=3)
    found = json.loads(together.stdout)
    assert found == json.loads(alone.stdout)
    shards = [damage["shard"] for damage in found["datasets"][str(dataset)]]
    assert shards == ["shard-00000.h5", "shard-00000.h5", "shard-00003.h5", "shard-00003.h5"]
    assert f"hpctrain: {dataset} is damaged in 4 places: restore the shards, or pack again" in together.stderr


def test_verify_of_nothing_ends_all_ranks_with_a_data_error(tmp_path: Path) -> None:
    result = verify(2, tmp_path / "nothing", expect=3)
    assert f"hpctrain: no dataset at {tmp_path / 'nothing'}: there is no such directory" in result.stderr
