"""Files that were made to harm are refused within seconds and little memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import load, load_newest_good
from hpctrain.checkpoint.format.metadata import SEAL_BYTES, Seal, decode_metadata, decode_seal, encode_seal
from hpctrain.checkpoint.loading.check_structure import content_places, hash_structure, read_structure
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of
from tests.unit.checkpoint.states import whole_tensors


def remade(good: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the checkpoint with its metadata changed and all of it sealed again, as an attacker could."""
    content = good.read_bytes()
    seal = decode_seal(content[:SEAL_BYTES], file_bytes=len(content))
    metadata = json.loads(content[seal.metadata_offset : seal.metadata_offset + seal.metadata_bytes])
    change(metadata)
    data = json.dumps(metadata).encode()
    target.write_bytes(content + data)
    with open(target, "rb") as file:
        structure_hash = hash_structure(
            file.fileno(),
            taken=[
                (0, SEAL_BYTES),
                (len(content), len(data)),
                *content_places(read_structure(good).metadata)[0],
            ],
            file_bytes=len(content) + len(data),
        )
    new = Seal(
        metadata_offset=len(content),
        metadata_bytes=len(data),
        metadata_hash=hash_of(data),
        structure_hash=structure_hash,
        file_bytes=len(content) + len(data),
    )
    target.write_bytes(encode_seal(new) + content[SEAL_BYTES:] + data)
    return target


def tensor_named(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in metadata["tensors"] if entry["name"] == name)


def piece_of(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    return tensor_named(metadata, name)["pieces"][0]


def set_in(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a key of the tensor, or of its piece."""
    return lambda metadata: (piece_of if key in ("offset", "extents") else tensor_named)(
        metadata, name
    ).__setitem__(key, value)


def many_tensors(metadata: dict[str, Any]) -> None:
    entry = tensor_named(metadata, "large")
    metadata["tensors"] = [{**entry, "name": str(i)} for i in range(20_000)]


def finely_cut(metadata: dict[str, Any]) -> None:
    """Many boxes that all meet each other: the slowest thing to check for a covering."""
    entry = tensor_named(metadata, "large")  # 200 x 701
    upper = [[[0, i], [i % 199 + 1, 1], "0" * 16] for i in range(701)]
    lower = [[[i % 199 + 1, i], [199 - i % 199, 1], "0" * 16] for i in range(701)]
    entry.update(view=[200, 701])
    piece_of(metadata, "large").update(start=[0, 0], shape=[200, 701], extents=(upper + lower) * 20)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "size beyond the file": lambda m: (
        tensor_named(m, "large").update(shape=[2**40], view=[2**40]),
        piece_of(m, "large").update(shape=[2**40], extents=[[[0], [2**40], "0" * 16]]),
    ),
    "huge dims": set_in("large", "shape", [2**62, 2**62]),
    "huge empty": set_in("empty", "shape", [2**62, 2**62, 0]),
    "negative shape": set_in("large", "shape", [-200, -701]),
    "negative offset": set_in("large", "offset", -4096),
    "offset beyond": set_in("large", "offset", 2**62),
    "offset in the seal": set_in("large", "offset", 0),
    "float offset": set_in("large", "offset", 8192.5),
    "true offset": set_in("large", "offset", True),
    "number beyond 4300 digits": set_in("large", "offset", 10**4000),
    "extent outside": set_in("large", "extents", [[[1], [200 * 701], "0" * 16]]),
    "extent with negative box": set_in("large", "extents", [[[-1], [200 * 701 + 1], "0" * 16]]),
    "extents missing": set_in("large", "extents", []),
    "extents of another rank": set_in("large", "extents", [[[0, 0], [200, 701], "0" * 16]]),
    "hash of wrong type": set_in("large", "extents", [[[0], [200 * 701], 7]]),
    "dtype unknown": set_in("large", "dtype", "__class__"),
    "dtype larger": set_in("large", "dtype", "complex128"),
    "33 dimensions": set_in("large", "shape", [1] * 33),
    "view of another size": set_in("large", "view", [7]),
    "overlapping tensors": lambda m: piece_of(m, "mask").update(offset=piece_of(m, "large")["offset"] + 8),
    "one region claimed 20000 times": many_tensors,
    "finely cut": finely_cut,
    "name twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "tensors is no list": lambda m: m.update(tensors={"a": 1}),
    "tensor is no object": lambda m: m["tensors"].append("x"),
    "no document": lambda m: m.pop("document"),
    "step negative": lambda m: m.update(step=-1),
    "other hash": lambda m: m.update(hash="crc32"),
    "other byte order": lambda m: m.update(byte_order="middle"),
    "time is text": lambda m: m.update(created_unix_s="now"),
    "id is a path": lambda m: m.update(id="../../../../etc"),
    "parent is a list": lambda m: m.update(parent=[1]),
    "part outside": lambda m: m.update(parts=[["../../data-00001.h5", 8192, "0" * 16]]),
    "part by an absolute path": lambda m: m.update(parts=[["/etc/passwd", 100, "0" * 16]]),
    "part is the main file": lambda m: m.update(parts=[["data-00000.h5", 8192, "0" * 16]]),
    "part twice": lambda m: m.update(parts=[["data-00001.h5", 8192, "0" * 16]] * 2),
    "part without a hash": lambda m: m.update(parts=[["data-00001.h5", 8192, None]]),
    "part of 2^62 bytes": lambda m: m.update(parts=[["data-00001.h5", 2**62, "0" * 16]]),
    "parts of a file": lambda m: m.update(parts=[["data-00001.h5", 8192, "0" * 16]]),
    "more parts than have names": lambda m: m.update(parts=[["data-00001.h5", 1, "0" * 16]] * 100_000),
    "piece in a file that is not listed": lambda m: piece_of(m, "large").update(file=1),
    "piece in file -1": lambda m: piece_of(m, "large").update(file=-1),
    "piece in file 2^62": lambda m: piece_of(m, "large").update(file=2**62),
    "piece outside the view": lambda m: piece_of(m, "large").update(start=[1]),
    "piece twice": lambda m: tensor_named(m, "large")["pieces"].append(piece_of(m, "large")),
    "no pieces": lambda m: tensor_named(m, "large").update(pieces=[]),
    "dataset is a number": lambda m: piece_of(m, "large").update(dataset=7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_made_to_harm_is_an_error_within_seconds(good: Path, tmp_path: Path, name: str) -> None:
    path = remade(good, tmp_path / "hostile.h5", HOSTILE[name])
    begin_s = time.process_time()  # of this process: the machine may be busy with others
    with pytest.raises(CheckpointError) as caught:
        load(path, comm=SerialWorld())
    assert time.process_time() - begin_s < 5
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_metadata_that_is_remade_without_harm_loads(good: Path, tmp_path: Path) -> None:
    # The counterpart of the cases above: they fail for what they change, not for having been remade.
    path = remade(good, tmp_path / "again.h5", lambda metadata: None)
    _, tensors = load(path, comm=SerialWorld())
    assert set(tensors) == set(whole_tensors())


@pytest.mark.parametrize("text", ["[" * 200_000, "{}", "[]", "null", '{"tensors": []}', "NaN", "\ud800"])
def test_metadata_that_is_not_ours_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError):
        decode_metadata(text.encode("utf-8", "surrogatepass"), file_bytes=10**6, byte_order="little")


@pytest.mark.parametrize("unit", ["[],", "{},", "1,", '"",', "[[0],[1],0],"])
def test_metadata_of_millions_of_small_things_is_an_error_within_seconds(unit: str) -> None:
    many = (12 << 20) // len(unit)
    text = '{"hash":"xxh3_64","byte_order":"little","parts":[],"tensors":[' + many * unit + "0]}"
    begin_s = time.process_time()
    with pytest.raises(CheckpointError):
        decode_metadata(text.encode(), file_bytes=1 << 40, byte_order="little")
    assert time.process_time() - begin_s < 2.5


def test_things_that_are_no_regular_file_are_errors_and_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-00000001.h5")
    (tmp_path / "step-00000002.h5").mkdir()
    assert load_newest_good(tmp_path, comm=SerialWorld()) is None
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(tmp_path / "step-00000001.h5", comm=SerialWorld())
    with pytest.raises(CheckpointError):
        load("/dev/zero", comm=SerialWorld())
    with pytest.raises(CheckpointError):
        load(tmp_path, comm=SerialWorld())


def test_a_sparse_file_of_a_terabyte_is_refused_at_once(good: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.h5"
    content = good.read_bytes()
    seal = decode_seal(content[:SEAL_BYTES], file_bytes=len(content))
    big = Seal(
        metadata_offset=seal.metadata_offset,
        metadata_bytes=seal.metadata_bytes,
        metadata_hash=seal.metadata_hash,
        structure_hash=seal.structure_hash,
        file_bytes=1 << 40,
    )
    bad.write_bytes(encode_seal(big) + content[SEAL_BYTES:])
    os.truncate(bad, 1 << 40)
    begin_s = time.process_time()
    with pytest.raises(CheckpointError, match="neither metadata nor tensor content"):
        load(bad, comm=SerialWorld())
    assert time.process_time() - begin_s < 5
