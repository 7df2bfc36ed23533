"""Rot, truncation and files made to harm: never loaded as good, never more than an error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import Replicated, State, load, load_newest_good, open_checkpoint, save
from hpctrain.checkpoint.format.boxes import Box, runs_of, whole_box
from hpctrain.checkpoint.format.metadata import SEAL_BYTES
from hpctrain.checkpoint.loading.check_structure import ContentFiles, content_places, read_structure
from hpctrain.checkpoint.loading.verified_content import DamagedContentError, read_region
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of
from tests.unit.checkpoint.loading.damage_cases import is_loaded
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

TRIALS = 250


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as `good`, as a folder of three files."""
    directory = tmp_path_factory.mktemp("good-folder")
    tensors = whole_tensors()
    tensors["large"] = tensors["large"][:200]

    def rank_main(world: World) -> None:
        save(state_of(world.rank, 3, tensors=tensors), directory=directory, step=1, comm=world, files=3)

    run_threads(3, rank_main, timeout_s=300)
    return directory / "step-00000001"


class Rot:
    """A copy of a checkpoint that is damaged in one place after the other, and mended in between."""

    def __init__(self, good: Path, place: Path) -> None:
        self.path = place / good.name
        shutil.copytree(good, self.path) if good.is_dir() else shutil.copy(good, self.path)
        self.files = sorted(self.path.iterdir()) if good.is_dir() else [self.path]
        self.contents = {file: file.read_bytes() for file in self.files}
        # (file, begin, end) of what is not content: seals, metadata, HDF5's structures.
        self.structures: list[tuple[Path, int, int]] = []
        for file, taken in zip(self.files, content_places(read_structure(self.path).metadata), strict=True):
            position = 0
            for offset, num_bytes in [*sorted(taken), (len(self.contents[file]), 0)]:
                if offset > position:
                    self.structures.append((file, position, offset))
                position = offset + num_bytes

    def refused(self, what: str, damaged: dict[Path, bytes | None]) -> None:
        """With these files instead, or without those that are None, the checkpoint must not load."""
        for file, content in damaged.items():
            file.unlink() if content is None else file.write_bytes(content)
        assert not is_loaded(self.path), what
        for file in damaged:
            file.write_bytes(self.contents[file])

    def flipped(self, file: Path, place: int, bit: int) -> None:
        byte = self.contents[file][place] ^ (1 << bit)
        with open(file, "r+b") as opened:
            opened.seek(place)
            opened.write(bytes([byte]))
            opened.flush()
            assert not is_loaded(self.path), f"{file.name} byte {place}, bit {bit}"
            opened.seek(place)
            opened.write(self.contents[file][place : place + 1])


@pytest.fixture(params=["file", "folder"])
def rot(request: pytest.FixtureRequest, good: Path, good_folder: Path, tmp_path: Path) -> Rot:
    return Rot({"file": good, "folder": good_folder}[request.param], tmp_path)


def test_no_flipped_bit_anywhere_is_loaded_as_good(rot: Rot) -> None:
    choose = np.random.default_rng(1)
    for number in range(TRIALS):
        # Any byte of any file; and the seals, the metadata and HDF5's structures, which are a small part of them.
        file = rot.files[number % len(rot.files)]
        rot.flipped(file, int(choose.integers(len(rot.contents[file]))), int(choose.integers(8)))
        file, begin, end = rot.structures[int(choose.integers(len(rot.structures)))]
        rot.flipped(file, int(choose.integers(begin, end)), int(choose.integers(8)))
    assert is_loaded(rot.path)


def test_no_truncation_extension_or_zeroing_is_loaded_as_good(rot: Rot) -> None:
    choose = np.random.default_rng(2)
    for number, file in enumerate(rot.files):
        content = rot.contents[file]
        lengths = [0, 1, SEAL_BYTES - 1, SEAL_BYTES, len(content) - 1]
        for length in lengths + [int(choose.integers(len(content))) for _ in range(40 // len(rot.files))]:
            rot.refused(f"file {number} cut to {length}", {file: content[:length]})
        rot.refused(f"file {number} with one byte more", {file: content + b"\0"})
        for _ in range(40 // len(rot.files)):
            start = int(choose.integers(len(content) - 4096))
            if content[start : start + 4096] != bytes(4096):
                zeroed = content[:start] + bytes(4096) + content[start + 4096 :]
                rot.refused(f"file {number}, zeros at {start}", {file: zeroed})
        rot.refused(f"file {number} all zeros", {file: bytes(len(content))})
        rot.refused(f"no file {number}", {file: None})
    assert is_loaded(rot.path)


def test_a_file_of_a_folder_that_is_a_link_to_elsewhere_is_refused(good_folder: Path, tmp_path: Path) -> None:
    rot = Rot(good_folder, tmp_path)
    for file in rot.files:
        elsewhere = tmp_path / "elsewhere.h5"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            load(rot.path, comm=SerialWorld())
        file.unlink()
        elsewhere.rename(file)
    assert is_loaded(rot.path)


def element_runs_of(path: Path, files: list[Path]) -> list[tuple[str, Path, int, int]]:
    """Of each extent the first run of bytes that lie together: tensor, file, begin, end."""
    found = []
    for tensor in read_structure(path).metadata.tensors.values():
        for piece, extent in tensor.extents:
            origin = tuple(e - p for e, p in zip(extent.box.offset, piece.box.offset, strict=True))
            runs = runs_of(Box(offset=origin, shape=extent.box.shape), shape=piece.box.shape)
            begin = piece.file_offset + int(runs.starts[0]) * tensor.elem_bytes
            end = begin + runs.run_elems * tensor.elem_bytes
            found.append((tensor.name, files[piece.file], begin, end))
    return found


def test_no_zeroed_or_swapped_extents_are_loaded_as_good(rot: Rot) -> None:
    def with_bytes(damaged: dict[Path, bytes | None], file: Path, begin: int, data: bytes) -> None:
        content = damaged.get(file) or rot.contents[file]
        damaged[file] = content[:begin] + data + content[begin + len(data) :]

    element_runs = element_runs_of(rot.path, rot.files)
    swaps, zeroed = 0, 0
    for number, (name, file, begin, end) in enumerate(element_runs):
        mine = rot.contents[file][begin:end]
        if any(mine):
            damaged: dict[Path, bytes | None] = {}
            with_bytes(damaged, file, begin, bytes(len(mine)))
            rot.refused(f"zeros in {name}", damaged)
            zeroed += 1
        half = len(mine) // 2
        if mine[:half] != mine[-half:]:
            damaged = {}
            with_bytes(damaged, file, begin, mine[-half:] + mine[half:-half] + mine[:half])
            rot.refused(f"halves of {name} swapped", damaged)
            swaps += 1
        for other, other_file, other_begin, other_end in element_runs[number + 1 :]:
            theirs = rot.contents[other_file][other_begin:other_end]
            if len(theirs) == len(mine) and theirs != mine:
                damaged = {}
                with_bytes(damaged, file, begin, theirs)
                with_bytes(damaged, other_file, other_begin, mine)
                rot.refused(f"{name} and {other} swapped", damaged)
                swaps += 1
    assert zeroed >= 20
    assert swaps >= 30
    assert is_loaded(rot.path)


def test_files_of_a_folder_that_belong_elsewhere_are_refused(good_folder: Path, tmp_path: Path) -> None:
    rot = Rot(good_folder, tmp_path)
    first, second = rot.files[1:]
    swapped = {first: rot.contents[second], second: rot.contents[first]}
    rot.refused("two parts swapped", dict(swapped))
    rot.refused("the main file as a part", {first: rot.contents[rot.files[0]]})
    tensors = whole_tensors()
    tensors["large"] = tensors["large"][:200]

    def rank_main(world: World) -> None:  # the same state again: the same bytes but for the id in the seals
        save(state_of(world.rank, 3, tensors=tensors), directory=tmp_path / "b", step=1, comm=world, files=3)

    run_threads(3, rank_main, timeout_s=300)
    for file in rot.files:
        other = (tmp_path / "b" / "step-00000001" / file.name).read_bytes()
        rot.refused(f"{file.name} of another save", {file: other})
    for name in ("seal", "part"):
        place = tmp_path / f"{name}.h5"
        shutil.copy(rot.files[0 if name == "seal" else 1], place)
        assert not is_loaded(place), "one file of a folder, by itself"
    assert is_loaded(rot.path)


def spoil(path: Path, tensor: str) -> None:
    """Flip one bit in the middle of a tensor's content."""
    stored = read_structure(path).metadata.tensors[tensor]
    with open(path, "r+b") as file:
        file.seek(stored.pieces[0].file_offset + stored.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_damage_that_one_rank_meets_makes_all_ranks_fall_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def save_steps(world: World) -> None:
        for step in (1, 2, 3):
            save(state_of(world.rank, 3), directory=tmp_path, step=step, comm=world)

    run_threads(3, save_steps, timeout_s=300)
    newest = tmp_path / "step-00000003.h5"
    spoil(newest, "columns")
    (tmp_path / "step-00000002.h5").write_bytes(b"rubbish")

    def rank_main(world: World) -> tuple[int, list[str], bool]:
        # Only rank 2 reads the part of "columns" that is damaged; the file's middle is in row 14.
        row = {0: 0, 1: 5, 2: 14}[world.rank]
        regions = {"columns": ((row, 0), (1, 31))}
        restored = load_newest_good(tmp_path, comm=world, regions=regions)
        assert restored is not None
        same = same_bits(restored.tensors["large"], whole_tensors()["large"])
        return restored.checkpoint.step, [entry.reason for entry in restored.rejected], same

    results = run_threads(3, rank_main, timeout_s=300)
    assert results[0] == results[1] == results[2]
    step, reasons, same = results[0]
    assert (step, same) == (1, True)
    assert "tensor 'columns', bytes" in reasons[0]
    assert "does not begin with a commit header" in reasons[1]
    said = [line for line in capfd.readouterr().err.splitlines() if "CHECKPOINT REJECTED" in line]
    assert len(said) == 2
    assert str(newest) in said[0]


def test_an_explicit_path_that_is_damaged_is_an_error_without_falling_back(
    good: Path, tmp_path: Path
) -> None:
    shutil.copy(good, tmp_path / "step-00000001.h5")
    bad = tmp_path / "step-00000002.h5"
    shutil.copy(good, bad)
    spoil(bad, "rows")

    def rank_main(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(bad, comm=world)
        assert caught.value.agreed
        return str(caught.value)

    texts = run_threads(2, rank_main, timeout_s=300)
    assert texts[0] == texts[1]
    assert "tensor 'rows'" in texts[0]
    assert is_loaded(tmp_path / "step-00000001.h5")


def test_with_only_damaged_checkpoints_loading_fails_instead_of_starting_anew(
    good: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "step-00000001.h5"
    shutil.copy(good, bad)
    spoil(bad, "large")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*'large'"):
        load_newest_good(tmp_path, comm=SerialWorld())


def test_a_newer_format_is_never_passed_over(good: Path, tmp_path: Path) -> None:
    shutil.copy(good, tmp_path / "step-00000001.h5")
    newer = tmp_path / "step-00000002.h5"
    shutil.copy(good, newer)
    with open(newer, "r+b") as file:
        lines = file.read(SEAL_BYTES).split(b"\n", 2)
        text = lines[0] + b"\n" + lines[1].replace(b'"format": 2', b'"format": 3') + b"\n"
        file.seek(0)
        file.write((text + hash_of(text).encode() + b"\n").ljust(SEAL_BYTES, b"\0"))
    with pytest.raises(CheckpointError, match="has format 3, this hpctrain reads formats 1 to 2"):
        load_newest_good(tmp_path, comm=SerialWorld())


def test_verify_names_every_damaged_extent_whatever_the_number_of_ranks(good: Path, tmp_path: Path) -> None:
    bad = tmp_path / "step-00000001.h5"
    shutil.copy(good, bad)
    for tensor in ("large", "columns", "optimizer.step"):
        spoil(bad, tensor)
    found = []
    for num_ranks in (1, 3):

        def rank_main(world: World) -> list[Any]:
            return verify(tmp_path, comm=world)

        results = run_threads(num_ranks, rank_main, timeout_s=300)
        assert all(result == results[0] for result in results)
        found.append(results[0][0].damage)
    assert found[0] == found[1]
    assert len(found[0]) == 3
    stored = read_structure(good).metadata.tensors["optimizer.step"]
    begin = stored.pieces[0].file_offset
    expected = f"tensor 'optimizer.step', bytes {begin} to {begin + 7} of the file"
    assert any(expected in line for line in found[0])


def test_a_file_that_the_disk_cannot_read_is_damage(tmp_path: Path) -> None:
    path = save(
        State(items=[Replicated(name="w", tensor=torch.ones(4))]),
        directory=tmp_path,
        step=1,
        comm=SerialWorld(),
    ).path
    tensor = open_checkpoint(path, comm=SerialWorld()).tensors["w"]
    # Address `file_offset` is not mapped: the kernel says EIO.
    with (
        ContentFiles([Path("/proc/self/mem")]) as files,
        pytest.raises(DamagedContentError, match=r"'w'.*cannot be read: Input/output error"),
    ):
        read_region(files, tensor=tensor, region=whole_box(tensor.shape))
