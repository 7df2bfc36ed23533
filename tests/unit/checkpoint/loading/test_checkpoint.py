"""Reading: files and folders, any region, shared by the ranks of a node, told where it waits."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hpctrain.checkpoint import (
    Checkpoint,
    Replicated,
    State,
    TensorShard,
    load,
    load_newest_good,
    open_checkpoint,
    save,
)
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.metadata import StoredExtent, StoredPiece
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.loading.checkpoint import divide_units, units_of
from hpctrain.checkpoint.loading.verified_content import element_runs_of, flat_start
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm import Monitored
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, CommunicationError
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

NUM_RANKS = 4
WHOLE = whole_tensors()


@pytest.fixture(scope="module", params=[1, 3], ids=["file", "folder"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")

    def rank_main(world: World) -> Path:
        state = state_of(world.rank, NUM_RANKS)
        return save(state, directory=directory, step=3, comm=world, files=request.param).path

    return run_threads(NUM_RANKS, rank_main, timeout_s=300)[0]


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return open_checkpoint(path, comm=SerialWorld())


@given(data=st.data())
def test_any_region_of_any_tensor_is_what_was_saved(checkpoint: Checkpoint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    whole = WHOLE[name]
    begin = [data.draw(st.integers(0, n)) for n in whole.shape]
    shape = [data.draw(st.integers(0, n - o)) for o, n in zip(begin, whole.shape, strict=True)]
    found = checkpoint.read(name, offset=tuple(begin), shape=tuple(shape))
    index = tuple(slice(o, o + n) for o, n in zip(begin, shape, strict=True))
    assert same_bits(found, whole[index])


def test_a_file_and_a_folder_are_opened_alike(path: Path) -> None:
    for given_path in (path, path.parent, str(path)):
        opened = open_checkpoint(given_path, comm=SerialWorld())
        assert opened.path == path
        assert opened.file_bytes == sum(file.stat().st_size for file in opened.files)
    assert [result.damage for result in verify(path, comm=SerialWorld())] == [()]


def spoil(path: Path, *, tensor: str) -> str:
    """Flip a bit in the last piece of a tensor; the name of the file."""
    checkpoint = open_checkpoint(path, comm=SerialWorld())
    piece = checkpoint.tensors[tensor].pieces[-1]
    file = checkpoint.files[piece.file]
    fd = os.open(file, os.O_RDWR)
    byte = os.pread(fd, 1, piece.file_offset)[0]
    os.pwrite(fd, bytes([byte ^ 8]), piece.file_offset)
    os.close(fd)
    return file.name


def folder_of(tmp_path: Path) -> Path:
    def rank_main(world: World) -> Path:
        return save(state_of(world.rank, NUM_RANKS), directory=tmp_path, step=3, comm=world, files=3).path

    return run_threads(NUM_RANKS, rank_main, timeout_s=300)[0]


def test_damage_in_a_folder_names_the_file(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    for tensor in ("columns", "large"):
        file = spoil(path, tensor=tensor)
        with pytest.raises(CheckpointError, match=rf"tensor '{tensor}', bytes \d+ to \d+ of {file}: "):
            open_checkpoint(path, comm=SerialWorld()).read(tensor)
    damage = verify(path, comm=SerialWorld())[0].damage
    assert [("'columns'" in line, "'large'" in line) for line in damage] == [(True, False), (False, True)]


def test_a_folder_without_one_of_its_files_or_with_another_one_is_no_checkpoint(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    part = path / "data-00002.h5"
    content = part.read_bytes()
    other = folder_of(tmp_path / "other") / part.name
    for change, reason in (
        (lambda: part.unlink(), "data-00002.h5: No such file"),
        (lambda: part.write_bytes(content[:-1]), "data-00002.h5 is .* bytes long, it was written with"),
        (lambda: part.write_bytes(other.read_bytes()), "data-00002.h5: its structure is damaged"),
        (lambda: part.write_bytes((path / "data-00001.h5").read_bytes()), "data-00002.h5"),
    ):
        change()
        with pytest.raises(CheckpointError, match=reason):
            load_newest_good(tmp_path, comm=SerialWorld())
    part.write_bytes(content)
    restored = load_newest_good(tmp_path, comm=SerialWorld())
    assert restored is not None
    assert restored.checkpoint.path == path


def test_one_file_of_a_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    with pytest.raises(
        CheckpointError, match="one of the 3 files of a checkpoint: give the path of their folder"
    ):
        load(path / "data-00000.h5", comm=SerialWorld())
    with pytest.raises(CheckpointError):
        load(path / "data-00001.h5", comm=SerialWorld())


@pytest.mark.parametrize("node_of_rank", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 2, 3], None])
def test_ranks_of_a_node_that_share_load_the_same_bits(path: Path, node_of_rank: list[int] | None) -> None:
    regions = {"rows": ((3, 0, 1), (5, 7, 2))}

    def rank_main(world: World) -> dict[str, torch.Tensor]:
        mine = regions if world.rank == 1 else None
        return load(path, comm=world, regions=mine, sharing="node", node_of_rank=node_of_rank)[1]

    for rank, tensors in enumerate(run_threads(NUM_RANKS, rank_main, timeout_s=300)):
        assert list(tensors) == sorted(WHOLE)
        for name, whole in WHOLE.items():
            expected = whole[3:8, 0:7, 1:3] if rank == 1 and name == "rows" else whole
            assert same_bits(tensors[name], expected), (rank, name)


def test_damage_that_one_sharing_rank_meets_is_an_error_on_all(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    spoil(path, tensor="transposed")

    def rank_main(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(path, comm=world, sharing="node", node_of_rank=[0, 0, 1, 1])
        return str(caught.value)

    texts = run_threads(NUM_RANKS, rank_main, timeout_s=300)
    assert len(set(texts)) == 1
    assert "tensor 'transposed', bytes" in texts[0]


def test_every_unit_is_read_by_one_rank_of_the_node_and_shares_are_even(path: Path) -> None:
    tensors = read_structure(path).metadata.tensors.values()
    units = [unit for tensor in tensors for unit in units_of(tensor) or ()]
    assert len(units) > 8
    total_bytes, largest = sum(unit.num_bytes for unit in units), max(unit.num_bytes for unit in units)
    for num_ranks in (1, 2, 3, 7):
        shares = divide_units(units, num_ranks=num_ranks)
        assert [unit for rounds in shares for part in rounds for unit in part] == units
        for rounds in shares:
            held = sum(unit.num_bytes for part in rounds for unit in part)
            assert held <= total_bytes / num_ranks + largest


@given(data=st.data())
def test_stretches_hold_whole_extents_in_the_order_of_the_file(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    cuts = sorted({0, columns, *data.draw(st.lists(st.integers(1, columns), max_size=3))})
    extents = []
    for left, right in itertools.pairwise(cuts):
        steps = sorted({0, rows, *data.draw(st.lists(st.integers(1, rows), max_size=3))})
        for top, bottom in itertools.pairwise(steps):
            box = Box(offset=(5 + top, left), shape=(bottom - top, right - left))
            extents.append(StoredExtent(box=box, hash="0" * 16))
    box = Box(offset=(5, 0), shape=(rows, columns))
    piece = StoredPiece(file=0, dataset="/x", file_offset=4096, box=box, extents=tuple(extents))
    element_runs = list(element_runs_of(piece))
    assert [s.start for s in element_runs] == [0, *(s.start + s.num_elems for s in element_runs[:-1])]
    assert element_runs[-1].start + element_runs[-1].num_elems == rows * columns
    assert {id(extent) for element_run in element_runs for extent in element_run.extents} == set(
        map(id, extents)
    )
    flat = torch.arange(rows * columns).reshape(rows, columns)
    for element_run in element_runs:
        for extent in element_run.extents:
            inside = Box(offset=(extent.box.offset[0] - 5, extent.box.offset[1]), shape=extent.box.shape)
            places = flat[inside.slices()].reshape(-1)
            assert (
                element_run.start
                <= int(places.min())
                <= int(places.max())
                < element_run.start + element_run.num_elems
            )
            one_run = bool((places.diff() == 1).all())
            assert flat_start(inside, shape=(rows, columns)) == (int(places[0]) if one_run else None)


def test_large_tensors_come_back_whole_and_may_be_written_to(tmp_path: Path) -> None:
    # Beyond 4 MiB memory comes in large pages; the end of a tensor is in small ones.
    made = {f"t{n}": torch.arange(n, dtype=torch.int32) for n in (1 << 20, (1 << 20) + 1, (5 << 19) + 7)}
    grid = torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000)

    def rank_main(world: World) -> Path:
        items: list[Replicated | TensorShard] = [Replicated(name=n, tensor=t) for n, t in made.items()]
        part = grid[:, 1500 * world.rank :][:, :1500]
        items.append(
            TensorShard(name="grid", tensor=part, global_shape=(1000, 3000), offset=(0, 1500 * world.rank))
        )
        return save(State(items=items), directory=tmp_path, step=1, comm=world, files=2).path

    path = run_threads(2, rank_main, timeout_s=300)[0]
    checkpoint, tensors = load(path, comm=SerialWorld())
    for name, tensor in [*made.items(), ("grid", grid)]:
        assert same_bits(tensors[name], tensor), name
        tensors[name].fill_(1)
    assert same_bits(checkpoint.read("grid", offset=(10, 700), shape=(980, 1500)), grid[10:990, 700:2200])


@pytest.mark.timing
def test_the_message_of_a_deadline_says_that_a_checkpoint_was_loaded(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def rank_main(world: World) -> None:
        monitored = Monitored(world, timeout_s=0.6, directory=tmp_path)
        if world.rank == 1:
            over.wait(300)
        try:
            load(path, comm=monitored)
        finally:
            over.set()

    with pytest.raises(CommunicationError):
        run_threads(2, rank_main, timeout_s=300)
    text = capfd.readouterr().err
    assert re.search(
        rf"\(loading checkpoint {re.escape(str(path))}\) for broadcast number \d+ of world", text
    )
    assert "did not come: rank 1\n" in text
