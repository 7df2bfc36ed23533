"""The room of a checkpoint that is let go of is the next one's, and nobody meets the old content or loses it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import Replicated, Shard, State, load, save
from hpctrain.checkpoint.files.checkpoint_names import (
    file_name,
    finished_newest_first,
    is_spare,
    partial_files,
    partial_name,
    spare_name,
)
from hpctrain.checkpoint.files.direct_io import allocate, declare_empty
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.checkpoint.retention.delete_old import remove_spares, take_spare
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.storage.filesystem_type import filesystem_of

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from hpctrain.cli.checkpoint.group import checkpoint_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)

NUM_ELEMS = 300_000
FS_IOC_GETVERSION = 0x80087601  # linux/fs.h


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if not filesystem_of(tmp_path).keeps_blocks:
        pytest.skip(f"{tmp_path} is not on ext4: no room is kept there")
    return tmp_path / "checkpoints"


def state_at(step: int, *, rank: int = 0, num_ranks: int = 1, num_elems: int = NUM_ELEMS) -> State:
    rows = torch.full((1, num_elems), float(step + rank))
    return State(
        items=[
            Replicated(name="w", tensor=torch.arange(num_elems, dtype=torch.float32) + step),
            Shard(name="rows", tensor=rows, global_shape=(num_ranks, num_elems), offset=(rank, 0)),
        ],
        document={"step": step},
    )


def save_steps(directory: Path, steps: range, *, num_ranks: int = 1, keep: int | Retention = 1) -> None:
    def rank_main(world: ThreadsWorld) -> None:
        for step in steps:
            state = state_at(step, rank=world.rank, num_ranks=world.num_ranks)
            save(state, directory=directory, step=step, comm=world, keep=keep, recycle=True)

    run_threads(num_ranks, rank_main)


def spares(directory: Path) -> list[Path]:
    return [path for path in partial_files(directory) if is_spare(path)]


def identity(path: Path) -> tuple[int, int]:
    """Of the file, not of its name: its inode's number, which others get after it, and that one's generation."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = fcntl.ioctl(fd, FS_IOC_GETVERSION, bytes(8))
        return os.fstat(fd).st_ino, int.from_bytes(found, "little")
    finally:
        os.close(fd)


def check(path: Path, *, step: int, num_ranks: int = 1) -> None:
    (found,) = verify(path, comm=SerialWorld())
    assert not found.damage
    _, loaded = load(path, comm=SerialWorld())
    assert torch.equal(loaded["w"], torch.arange(NUM_ELEMS, dtype=torch.float32) + step)
    for rank in range(num_ranks):
        assert torch.equal(loaded["rows"][rank], torch.full((NUM_ELEMS,), float(step + rank)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_saves_take_turns_in_the_room_of_those_let_go(directory: Path, num_ranks: int) -> None:
    files = []
    for step in range(1, 8):
        save_steps(directory, range(step, step + 1), num_ranks=num_ranks, keep=2)
        kept = finished_newest_first(directory)
        assert [path.name for path in kept] == [file_name(s) for s in (step, step - 1) if s]
        for path, of_step in zip(kept, (step, step - 1), strict=False):
            check(path, step=of_step, num_ranks=num_ranks)
        files.append(identity(kept[0]))
        assert len(spares(directory)) == (step > 2)
    assert files[3:] == files[:4]
    assert len(set(files)) == 3


def test_a_spare_file_reads_as_zeros_and_keeps_its_blocks(directory: Path) -> None:
    directory.mkdir()
    path = directory / "file"
    path.write_bytes(b"old" * 100_000)
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        blocks = os.fstat(fd).st_blocks
        assert declare_empty(fd, num_bytes=300_000)
        os.fsync(fd)
        assert path.read_bytes() == bytes(300_000)
        assert os.fstat(fd).st_blocks == blocks > 0
        allocate(fd, num_bytes=300_000)
        assert path.read_bytes() == bytes(300_000)
    finally:
        os.close(fd)


def test_nothing_of_the_old_content_can_be_read_in_its_room(directory: Path) -> None:
    save_steps(directory, range(1, 3))
    (spare,) = spares(directory)
    file, size = identity(spare), spare.stat().st_size
    partial = directory / partial_name(file_name(3), unique="0" * 16)
    take_spare(directory, partial, file_bytes=size)
    assert identity(partial) == file
    assert partial.read_bytes() == bytes(size)
    assert not spare.exists()


@pytest.mark.parametrize("change", ["mode", "owner", "attribute", "umask"])
def test_room_under_other_rights_than_a_new_file_has_is_given_back(directory: Path, change: str) -> None:
    if change == "owner" and os.getuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    save_steps(directory, range(1, 3))
    (spare,) = spares(directory)
    before = os.umask(0o027 if change == "umask" else 0o022)
    try:
        if change == "mode":
            spare.chmod(0o666)
        elif change == "owner":
            os.chown(spare, 1234, 1234)
        elif change == "attribute":
            os.setxattr(spare, "user.note", b"epoch 1")
        save_steps(directory, range(3, 4))
    finally:
        os.umask(before)
    path = directory / file_name(3)
    check(path, step=3)
    assert path.stat().st_mode & 0o777 == (0o640 if change == "umask" else 0o644)
    assert path.stat().st_uid == os.getuid()
    assert os.listxattr(path) == []
    assert len(list(directory.iterdir())) == 2  # and the room of the second


def test_who_opens_the_file_at_that_moment_does_not_end_the_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(directory, range(1, 3))
    (spare,) = spares(directory)
    plain, tried, signals = fcntl.fcntl, [], []

    def slow(fd: int, command: int, argument: int) -> int:
        result = int(plain(fd, command, argument))
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            with pytest.raises(BlockingIOError):  # our lease is in the way, and is broken
                os.open(spare, os.O_RDONLY | os.O_NONBLOCK)
            tried.append(spare)
        return result

    monkeypatch.setattr("hpctrain.checkpoint.retention.delete_old.fcntl.fcntl", slow)
    kept = signal.signal(signal.SIGIO, lambda number, frame: signals.append(number))
    try:
        save(state_at(3), directory=directory, step=3, comm=SerialWorld(), keep=1, recycle=True)
    finally:
        signal.signal(signal.SIGIO, kept)
    assert tried == [spare]
    assert signals == []
    check(directory / file_name(3), step=3)


def is_linked(path: Path) -> Callable[[], None]:
    """It has a second name."""
    other = path.with_name("mine.h5")
    os.link(path, other)
    return lambda: check(other, step=1)


def is_open(path: Path) -> Callable[[], None]:
    """Somebody reads it."""
    before, fd = path.read_bytes(), os.open(path, os.O_RDONLY)

    def same() -> None:
        assert os.pread(fd, len(before) + 1, 0) == before
        os.close(fd)

    return same


def is_mapped(path: Path) -> Callable[[], None]:
    """Somebody has tensors that lie in it, and has closed it."""
    mapped = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    before = mapped.clone()

    def same() -> None:
        assert torch.equal(mapped, before)

    return same


@pytest.mark.parametrize("in_use", [is_linked, is_open, is_mapped], ids=lambda f: f.__name__)
def test_content_that_somebody_has_stays(
    directory: Path, in_use: Callable[[Path], Callable[[], None]]
) -> None:
    save_steps(directory, range(1, 2))
    still_there = in_use(directory / file_name(1))
    save_steps(directory, range(2, 5))
    check(directory / file_name(4), step=4)
    still_there()


@pytest.mark.parametrize("num_elems", [1000, 3 * NUM_ELEMS])
def test_room_of_another_size_becomes_the_size_it_has_to_be(
    directory: Path, tmp_path: Path, num_elems: int
) -> None:
    save_steps(directory, range(1, 3))
    (spare,) = spares(directory)
    file = identity(spare)
    state = state_at(3, num_elems=num_elems)
    path = save(state, directory=directory, step=3, comm=SerialWorld(), keep=1, recycle=True).path
    new = save(state, directory=tmp_path / "new", step=3, comm=SerialWorld()).path
    assert identity(path) == file
    assert path.stat().st_size == new.stat().st_size
    assert path.stat().st_blocks == new.stat().st_blocks
    assert not verify(path, comm=SerialWorld())[0].damage
    assert torch.equal(load(path, comm=SerialWorld())[1]["w"], state.items[0].tensor)


def test_of_several_that_are_let_go_one_is_kept(directory: Path) -> None:
    save_steps(directory, range(1, 5), keep=4)
    save_steps(directory, range(5, 6), keep=1)
    assert len(spares(directory)) == 1
    assert len(list(directory.iterdir())) == 2


@pytest.mark.parametrize("options", [{}, {"recycle": True, "files": 2}], ids=["not asked for", "a folder"])
def test_otherwise_there_is_no_spare_file(directory: Path, options: dict[str, object]) -> None:
    def rank_main(world: ThreadsWorld) -> None:
        for step in range(1, 4):
            state = state_at(step, rank=world.rank, num_ranks=world.num_ranks)
            save(state, directory=directory, step=step, comm=world, keep=1, **options)

    save_steps(directory, range(1, 3), num_ranks=2)
    assert len(spares(directory)) == 1
    run_threads(2, rank_main)
    assert len(list(directory.iterdir())) == 1


def test_what_only_looks_like_a_spare_file_is_not_written_to(directory: Path, tmp_path: Path) -> None:
    save_steps(directory, range(1, 2))
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(range(256)) * ((directory / file_name(1)).stat().st_size // 256 + 1))
    os.truncate(outside, (directory / file_name(1)).stat().st_size)
    before = outside.read_bytes()
    (directory / spare_name(file_name(1), unique="0" * 16)).symlink_to(outside)
    os.mkfifo(directory / spare_name(file_name(1), unique="1" * 16))
    (directory / spare_name(file_name(1), unique="2" * 16)).mkdir()
    save_steps(directory, range(2, 3))
    assert outside.read_bytes() == before
    check(directory / file_name(2), step=2)
    assert len(list(directory.iterdir())) == 2  # and the room of the first


def test_a_filesystem_that_cannot_declare_a_file_empty_gets_a_new_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpctrain.checkpoint.retention.delete_old.declare_empty", lambda fd, *, num_bytes: False
    )
    save_steps(directory, range(1, 5))
    check(directory / file_name(4), step=4)
    assert len(list(directory.iterdir())) == 2


def test_spare_files_are_listed_and_removed(directory: Path) -> None:
    save_steps(directory, range(1, 3))
    (spare,) = spares(directory)
    listed = CliRunner().invoke(checkpoint_app, ["list", str(directory), "--json"])
    assert json.loads(listed.stdout)["spare"] == [spare.name]
    assert json.loads(listed.stdout)["unfinished"] == []
    assert spare.name in CliRunner().invoke(checkpoint_app, ["list", str(directory)]).stdout
    CliRunner().invoke(checkpoint_app, ["prune", str(directory), "--keep", "1"])
    assert spare.exists()
    CliRunner().invoke(checkpoint_app, ["prune", str(directory), "--keep", "1", "--unfinished"])
    assert not spare.exists()

    save_steps(directory, range(3, 4))
    assert len(spares(directory)) == 1
    remove_spares(directory)
    assert [path.name for path in directory.iterdir()] == [file_name(3)]
    remove_spares(directory / "not-there")
