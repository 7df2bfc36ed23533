"""Saves that fail, or are refused: the same error on all ranks, and nothing is left."""

from __future__ import annotations

import os
import re
import resource
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import CheckpointSave, HostBuffers, Replicated, SaveOptions, State, load, save
from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    partial_name,
)
from hpctrain.checkpoint.saving.rank_file_work import rename_finished
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import same_bits, state_of


def test_no_memory_for_the_copy_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        buffers = HostBuffers()
        if world.rank == 1:
            # The real thing, from torch: more than the machine has addresses for.
            buffers.take = lambda num_bytes, *, pinned=False: torch.empty(2**60, dtype=torch.uint8)  # type: ignore[method-assign]
        saving = CheckpointSave.begin(
            state_of(world.rank, 2), directory=tmp_path, step=1, comm=world, buffers=buffers
        )
        with pytest.raises(CheckpointError) as error:
            saving.finish()
        return str(error.value)

    reported = run_threads(2, rank_main, timeout_s=300)
    assert reported[0] == reported[1]
    assert "rank 1" in reported[0]
    assert "bytes to host memory for the background save" in reported[0]
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_is_no_json_on_one_rank_is_reported_on_all(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        tensor = Replicated(name="w", tensor=torch.zeros(3))
        save(State(items=[tensor], document={"a": 1}), directory=tmp_path, step=1, comm=world)
        document = {"a": object() if world.rank == 1 else 1}
        with pytest.raises(CheckpointError, match="must be JSON") as error:
            save(State(items=[tensor], document=document), directory=tmp_path, step=2, comm=world)
        return str(error.value)

    reported = run_threads(2, rank_main, timeout_s=300)
    assert all("rank 1" in text for text in reported)


def test_a_commit_that_fails_leaves_the_older_one_its_name(tmp_path: Path) -> None:
    for options in ({}, {"files": 2}):
        kept = save(state_of(0, 1), directory=tmp_path, step=5, comm=SerialWorld(), **options).path
        lost = tmp_path / partial_name(folder_name(5), unique="0" * 16)
        with pytest.raises(CheckpointError, match="No such file"):
            rename_finished(lost, tmp_path / folder_name(5), unique="0" * 16)
        assert list(tmp_path.iterdir()) == [kept]


def test_what_cannot_be_removed_is_reported_and_no_reason_not_to_save() -> None:
    state = state_of(0, 1)
    with tempfile.TemporaryDirectory() as name:  # pytest's own lets nobody else in
        directory = Path(name)
        save(state, directory=directory, step=4, comm=SerialWorld())
        left = directory / partial_name(folder_name(5), unique="0" * 16)
        left.mkdir()
        (left / "data-00000.h5").touch()
        left.chmod(0o555)
        root = os.geteuid() == 0
        try:
            if root:  # may remove everything
                os.chown(directory, 65534, -1)
                os.seteuid(65534)
            result = save(state, directory=directory, step=5, comm=SerialWorld())
        finally:
            if root:
                os.seteuid(0)
            left.chmod(0o755)
        assert f"could not remove {left.name}, left by an earlier save: Permission denied" in result.note
        assert finished_newest_first(directory)[0] == result.path
        save(state, directory=directory, step=6, comm=SerialWorld())
        assert not left.exists()


def test_an_error_in_the_background_reaches_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    def rank_main(world: ThreadsWorld) -> str:
        state = state_of(world.rank, world.num_ranks)
        gate = threading.Event()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(gate.wait)
            saving = CheckpointSave.begin(
                state, directory=tmp_path, step=1, comm=world, options=SaveOptions(files=2),
                buffers=HostBuffers(), executor=executor,
            )  # fmt: skip
            if world.rank == 2:  # its file is gone before it writes
                (made,) = tmp_path.glob(".step-*.partial-*/data-00001.h5")
                made.unlink()
            world.barrier()
            gate.set()
            with pytest.raises(CheckpointError) as caught:
                saving.finish()
        world.barrier()
        return str(caught.value)

    texts = run_threads(3, rank_main)
    assert len(set(texts)) == 1
    assert "rank 2" in texts[0]
    assert "data-00001.h5" in texts[0]
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error_and_the_process_goes_on(tmp_path: Path) -> None:
    world = SerialWorld()
    state = State(items=[Replicated(name="w", tensor=torch.zeros(1 << 20))])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="limit on file sizes"):
            save(state, directory=tmp_path, step=1, comm=world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert (
        load(save(state, directory=tmp_path, step=1, comm=world).path, comm=world)[1]["w"].numel() == 1 << 20
    )


def test_metadata_that_no_reader_takes_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.checkpoint.planning.hdf5_skeleton.MAX_METADATA_BYTES", 20_000)

    def rank_main(world: ThreadsWorld) -> None:
        def state(note: str) -> State:
            return State(items=[Replicated(name="w", tensor=torch.zeros(8))], document={"note": note})

        save(state("x"), directory=tmp_path, step=1, comm=world)
        with pytest.raises(CheckpointError, match="the limit is 20000"):
            save(state("x" * 30_000), directory=tmp_path, step=2, comm=world)

    run_threads(2, rank_main)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.h5"]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"files": 0}, "files = 0"), ({"files": "nodes"}, "files = 'nodes'"), ({"files": "node"}, "node_of_rank lists 0"),
     ({"local": True}, 'files = "node"'), ({"limit_mb_per_s": 0.0}, "limit_mb_per_s = 0.0"),
     ({"page_cache": "never"}, "page_cache = 'never'"),
     ({"engine": "mpio", "page_cache": "bypass"}, "does not apply to engine")],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        save(state_of(0, 1), directory=tmp_path, step=1, comm=SerialWorld(), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_memory_for_the_copy_is_an_error_on_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
        raise CheckpointError("there is no memory for a tensor")

    monkeypatch.setattr("hpctrain.checkpoint.saving.background.fresh_tensor", no_memory)

    def rank_main(world: ThreadsWorld) -> None:
        buffers = HostBuffers()
        if world.rank == 0:
            monkeypatch.setattr(
                buffers, "take", lambda num_bytes, **_: torch.empty(num_bytes, dtype=torch.uint8)
            )
        with ThreadPoolExecutor(1) as executor:
            saving = CheckpointSave.begin(
                state_of(world.rank, 2),
                directory=tmp_path,
                step=1,
                comm=world,
                buffers=buffers,
                executor=executor,
            )
            with pytest.raises(CheckpointError, match=r"rank 1.*no memory for a tensor"):
                saving.finish()

    run_threads(2, rank_main)
    assert finished_newest_first(tmp_path) == []


def test_small_tensors_without_memory_of_their_own_are_refused_and_odd_ones_saved(tmp_path: Path) -> None:
    freed = torch.rand(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="no memory of its own"):
        save(
            State(items=[Replicated(name="freed", tensor=freed)]),
            directory=tmp_path,
            step=1,
            comm=SerialWorld(),
        )
    base = torch.randn(6, 8, dtype=torch.complex64)
    odd = {
        "conjugate": base.conj(), "negative": base.conj().imag, "turned": torch.rand(5, 7).T,
        "spread": torch.rand(1, 3).expand(4, 3), "parameter": torch.nn.Parameter(torch.rand(9)),
        "later": torch.arange(50)[20:], "scalar": torch.tensor(3.0), "half": torch.rand(11).bfloat16(),
    }  # fmt: skip
    items = [Replicated(name=name, tensor=tensor) for name, tensor in odd.items()]
    save(State(items=items), directory=tmp_path, step=2, comm=SerialWorld())
    _, tensors = load(tmp_path / "step-00000002.h5", comm=SerialWorld())
    assert all(same_bits(tensors[name], tensor.detach().contiguous()) for name, tensor in odd.items())
