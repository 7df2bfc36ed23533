"""Hostile and damaged checkpoints of DCP: refused with the reason, and nothing in them runs."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from hpctrain.checkpoint import import_dcp, load
from hpctrain.checkpoint.operations.torch_archives import Record, read_pickled_data
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import same_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Shell:
    """Pickled as a call of os.system."""

    def __init__(self, mark: Path) -> None:
        self.command = f"touch {mark}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {"model": {"weight": torch.arange(4096.0).reshape(64, 64)}, "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def refused(source: Path) -> str:
    """Returns the message with which the import is refused; nothing may be left of it."""
    target = source.parent / "ours"
    with pytest.raises(CheckpointError) as caught:
        import_dcp(source, target, comm=SerialWorld(), step=1)
    assert not target.exists() or not list(target.iterdir())
    return str(caught.value)


def change(source: Path, edit: Callable[[Metadata], Any]) -> None:
    """Replaces the metadata by what `edit` returns, or by itself after the edit."""
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(edit(metadata) or metadata))


def tensor_entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.weight"]


def storage_of(metadata: Metadata, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def test_a_call_in_the_metadata_is_refused_and_does_not_run(source: Path) -> None:
    mark = source.parent / "ran"

    def hide(metadata: Metadata) -> None:
        tensor_entry(metadata).chunks[0] = Shell(mark)  # type: ignore[call-overload]

    (source / ".metadata").write_bytes(pickle.dumps(Shell(mark)))
    message = refused(source)
    assert re.search(
        r"has (posix|nt)\.system where .*Metadata is expected: nothing in the file was run", message
    )
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=source)
    change(source, hide)
    assert "system where" in refused(source)
    for wrap in (tuple, list):  # protocols before 2 call differently
        (source / ".metadata").write_bytes(pickle.dumps(wrap([Shell(mark)]), protocol=0))
        assert "instruction" in refused(source)
    assert not mark.exists()


def test_a_call_in_an_object_or_a_tensor_does_not_run(source: Path) -> None:
    mark = source.parent / "ran"
    dcp.save({"model": {"w": torch.ones(3)}, "evil": Shell(mark)}, checkpoint_id=source.parent / "evil")
    assert not mark.exists()
    done = import_dcp(source.parent / "evil", source.parent / "ours", comm=SerialWorld(), step=1)
    assert list(done.left_out) == ["evil"]

    file = source / "__0_0.distcp"
    begin = file.stat().st_size
    with open(file, "ab") as stream:
        torch.save(Shell(mark), stream)
        length = stream.tell() - begin

    def lead(metadata: Metadata) -> None:
        info = storage_of(metadata, "model.weight")
        info.offset, info.length = begin, length

    change(source, lead)
    (source.parent / "ours" / "step-00000001.h5").unlink()
    assert "system, not a plain dense tensor: nothing in the archive was run" in refused(source)
    assert not mark.exists()


def _outside(metadata: Metadata) -> None:
    storage_of(metadata, "model.weight").relative_path = "../secret"


def _beyond(metadata: Metadata) -> None:
    storage_of(metadata, "model.weight").length += 1 << 20


def _other_dtype(metadata: Metadata) -> None:
    tensor_entry(metadata).properties.dtype = torch.int32


def _missing(metadata: Metadata) -> None:
    tensor_entry(metadata).size = torch.Size([65, 64])


def _overlapping(metadata: Metadata) -> None:
    entry = tensor_entry(metadata)
    entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([1, 64])))


def _too_long(metadata: Metadata) -> None:
    entry = tensor_entry(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 64])


def _transformed(metadata: Metadata) -> None:
    storage_of(metadata, "model.weight").transform_descriptors = ["stream.zstd"]


def _newer(metadata: Metadata) -> None:
    metadata.version = "9.0"


def _no_place(metadata: Metadata) -> None:
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_outside, "'../secret', which is not a plain file name"),
        (_beyond, "the checkpoint is not complete"),
        (_other_dtype, r"the archive holds float32 \[64, 64\], but the metadata says int32"),
        (_missing, "hold 4096 elements, and do not hold each of the 4160 elements"),
        (_overlapping, "chunks overlap or are missing"),
        (_too_long, "bytes together, but the checkpoint's files have only"),
        (_transformed, "transformed by extensions"),
        (_newer, "the metadata has version '9.0'"),
        (_no_place, "the metadata does not say where the chunk"),
        (lambda metadata: {"a": 1}, "the metadata has dict where"),
        (lambda metadata: dataclasses.replace(metadata, storage_data=[1]), "not a dict"),
    ],
)
def test_metadata_that_does_not_fit(source: Path, edit: Callable[[Metadata], Any], message: str) -> None:
    change(source, edit)
    assert re.search(message, refused(source))


def test_damaged_files(source: Path) -> None:
    path, content = source / "__0_0.distcp", (source / "__0_0.distcp").read_bytes()
    row = torch.arange(640.0, 704.0).numpy().tobytes()
    place = content.index(row)
    path.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    assert "is damaged: its CRC-32 is" in refused(source)
    done = import_dcp(source, source.parent / "ours", comm=SerialWorld(), step=1, verify=False)
    done.saved.path.unlink()
    path.write_bytes(content[: len(content) // 2])
    assert "the checkpoint is not complete" in refused(source)
    path.write_bytes(bytes(len(content)))
    assert "damaged, or not written by torch.save" in refused(source)
    path.unlink()
    assert "is missing or is not a regular file" in refused(source)
    metadata = source / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    assert "is not a valid pickle" in refused(source)


def test_every_flipped_byte_of_the_metadata_ends_in_an_error_or_the_same_tensor(source: Path) -> None:
    path = source / ".metadata"
    content, weight = path.read_bytes(), torch.arange(4096.0).reshape(64, 64)
    num_imported = 0
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            done = import_dcp(source, source.parent / "ours", comm=SerialWorld(), step=1, replace=True)
        except (CheckpointError, UsageError):
            continue
        num_imported += 1
        _, tensors = load(done.saved.path, comm=SerialWorld())
        assert any(same_bits(tensor, weight) for tensor in tensors.values()), (
            place
        )  # its name may have changed
    assert num_imported


def test_pickles_are_read_as_plain_data() -> None:
    value = {
        "a": [1, 2.5, -3, 1 << 70, True, None, "ä"],
        "b": (),
        "c": (1,),
        "d": (1, 2, 3, 4),
        "e": {"f": []},
    }
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickled_data(pickle.dumps(value, protocol=protocol), where="here") == value
        found = read_pickled_data(pickle.dumps(torch.float16, protocol=protocol), where="here")
        assert isinstance(found, Record)
        assert (found.name, found.args) == ("torch.float16", None)
    hostile = {
        b"\x80\x02]r\xff\xff\xff\x7f.": None,  # a huge index of the memo takes no memory
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.": "not a valid pickle",  # a text longer than the file
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.": "record",
        b"\x80\x02X\x02\x00\x00\x00ls\x85R.": "not a valid pickle",
        b"\x80\x02}K\x01\x85R.": "not a name",
        b"(S'ls'\nios\nsystem\n.": "instruction",
        b"\x80\x02\x82\x01.": "instruction",
        b"\x80\x02K\x01}b.": "changes a int",
        b"\x80\x02}]K\x01s.": "not a valid pickle",
    }
    for content, expected in hostile.items():
        if expected is None:
            assert read_pickled_data(content, where="here") == []
        elif expected == "record":
            found = read_pickled_data(content, where="here")
            assert (found.name, found.args) == ("os.system", ("ls",))
        else:
            with pytest.raises(CheckpointError, match=expected):
                read_pickled_data(content, where="here")
