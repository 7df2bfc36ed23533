"""`hpctrain data pack` on real ranks: the dataset is the same for any number of them; they fail together."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import Dataset, Existing, pack_arrays, verify_dataset
from hpctrain.data.packing.pack import PackOptions, pack_documents, pack_iterator
from hpctrain.errors import DataError, UsageError
from tests.ranks_launcher import run_command, run_ranks
from tests.token_arrays import TokenArrays

pytestmark = pytest.mark.launches


def digest(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


def fields() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"image": random.integers(0, 255, (100, 3, 5), dtype=np.uint8), "label": np.arange(100)}


def part_of(number: int) -> Iterator[dict[str, Any]]:
    return ({"x": [number, k]} for k in range(20 * number))


def failing_part(number: int) -> Iterator[dict[str, Any]]:
    for sample in part_of(number):
        if sample["x"] == [1, 16]:
            raise RuntimeError("no more disk in the simulation")
        yield sample


def times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.glob("shard-*")}


def pack_everything(world: Any, root: str) -> dict[str, Any]:
    """Datasets by all ranks together; the errors that each rank saw; how many shards a resumed packing kept."""
    out = Path(root)
    documents = TokenArrays([np.full(30 + 7 * k, k + 1, np.uint8) for k in range(9)])
    pack_arrays(out / "arrays", fields(), shard_samples=9, comm=world)
    pack_documents(
        out / "text", documents, window=16, stride=8, boundaries="split",
        options=PackOptions(shard_bytes=90, comm=world),
    )  # fmt: skip
    parts: dict[str, Any] = {"num_parts": 4, "shard_samples": 7, "comm": world}
    errors = []
    for attempt in (
        lambda: pack_iterator(out / "iterator", failing_part, **parts),
        lambda: pack_arrays(out / "arrays", fields(), comm=world),
    ):
        try:
            attempt()
        except (DataError, UsageError) as error:
            errors.append([type(error).__name__, error.agreed, str(error)])
    before = times(out / "iterator")
    world.barrier()
    manifest = pack_iterator(out / "iterator", part_of, existing=Existing.RESUME, **parts)
    after = times(out / "iterator")
    kept = sum(after[name] == time for name, time in before.items())
    return {"errors": errors, "samples": manifest.samples, "before": len(before), "kept": kept}


def test_any_number_of_ranks_packs_the_same_files_fails_together_and_goes_on(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    pack_everything(SerialWorld(), str(alone))
    outputs = run_ranks(3, pack_everything, str(together)).outputs
    for name in ("arrays", "text", "iterator"):
        assert digest(together / name) == digest(alone / name)
        assert verify_dataset(together / name) == []
    assert Dataset.open(together / "iterator").gather(np.arange(120))["x"][[0, 19, 20, -1]].tolist() == [
        [1, 0], [1, 19], [2, 0], [3, 59],
    ]  # fmt: skip
    for output in outputs:
        assert output["errors"] == outputs[0]["errors"]
        assert output["samples"] == 120
        assert 5 <= output["before"] == output["kept"] < 19
    (failed, refused) = outputs[0]["errors"]
    assert failed[:2] == ["DataError", True]
    assert "at sample 16 of part 1 of the iterator it raised RuntimeError: no more disk" in failed[2]
    assert refused[:2] == ["UsageError", True]


def test_the_command_packs_on_ranks_and_says_so_once(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **fields())
    command = [sys.executable, "-m", "hpctrain.cli.main", "data", "pack", str(tmp_path / "x.npz")]
    options = ["--held-out", "0.2", "--shard-mb", "0.0005", "--compress", "gzip"]
    result = run_command(2, [*command, str(tmp_path / "out"), *options], expect=0)
    assert f"{tmp_path}/out/train: 80 samples in 4 shards" in result.stdout
    assert result.stdout.count("samples in") == 2
