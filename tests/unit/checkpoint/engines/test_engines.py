"""Parts of the engines: turns, batches, filesystems, striping, and the choice of one rank."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest

from hpctrain.checkpoint.engines.engine_choice import choose_engine
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.engines.write_batch import (
    BatchExtent,
    WriteBatch,
    dealt,
    domains,
    joined,
    paced,
    plan_turn,
)
from hpctrain.checkpoint.files.lustre_striping import Stripes, alignment_of, set_stripes, stripes_for
from hpctrain.checkpoint.saving.save_options import PageCache, SaveOptions
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage.filesystem_type import Filesystem

LUSTRE = Filesystem(kind="lustre")


@pytest.mark.parametrize(
    ("kind", "page_cache", "local", "bypassed"),
    [
        ("ext4", "auto", False, True), ("xfs", "auto", False, True), ("ext4", "auto", True, False),
        ("ext4", "use", False, False), ("lustre", "auto", False, False), ("lustre", "bypass", False, True),
        ("tmpfs", "auto", False, False), ("fuse.glusterfs", "auto", False, False),
    ],
)  # fmt: skip
def test_the_page_cache_is_bypassed_where_that_is_known_to_pay_or_asked_for(
    kind: str, page_cache: PageCache, local: bool, bypassed: bool
) -> None:
    options = SaveOptions(page_cache=page_cache, local=local, files="node")
    assert options.bypass_cache(Filesystem(kind=kind)) is bypassed


def reach(begin: int, end: int, *, scattered: bool = True) -> BatchExtent:
    return BatchExtent(begin=begin, end=end, num_pieces=100 if scattered else 1, num_bytes=end - begin)


def test_large_pieces_are_written_alone_and_small_ones_that_interleave_together() -> None:
    reaches = [reach(0, 900), reach(10, 500), reach(0, 1000, scattered=False), None, reach(900, 950)]
    turn = plan_turn(reaches, max_span=1 << 20)
    assert turn.together == {0, 1}
    assert (turn.begin, turn.until) == (0, 500)
    assert turn.alone == {2, 4}
    assert plan_turn(reaches, max_span=70).until == 70
    shares = plan_turn([reach(0, 100), reach(100, 200), reach(200, 300)], max_span=1 << 20)
    assert shares.alone == {0, 1, 2}
    assert not shares.together


def test_every_turn_gets_on_until_nothing_is_left() -> None:
    rng = random.Random(3)
    for _ in range(300):
        num_ranks = rng.randint(1, 6)
        left: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        offset = 0
        for _ in range(rng.randint(0, 40)):
            length = rng.randint(1, 9)
            left[rng.randrange(num_ranks)].append((offset, offset + length))
            offset += length
        for _ in range(1000):
            reaches = [
                reach(byte_ranges[0][0], byte_ranges[-1][1], scattered=rng.random() < 0.8)
                if byte_ranges
                else None
                for byte_ranges in left
            ]
            if not any(reaches):
                break
            max_span = rng.randint(1, 100)
            turn = plan_turn(reaches, max_span=max_span)
            assert turn.until - turn.begin <= max_span
            before = [list(byte_ranges) for byte_ranges in left]
            assert not turn.alone & turn.together
            for rank in turn.alone:
                left[rank] = []
            for rank in turn.together:
                left[rank] = [(max(a, turn.until), b) for a, b in left[rank] if b > turn.until]
            assert left != before
        else:
            raise AssertionError(f"1000 turns, and still {left}")


@pytest.mark.parametrize("max_bytes", [1, 7, 100, 10_000])
def test_batches_hold_no_more_than_they_may_and_lose_nothing(max_bytes: int) -> None:
    rng = random.Random(max_bytes)
    file = bytes(rng.randrange(256) for _ in range(2000))
    byte_ranges, offset = [], 0
    while offset < len(file):
        length = rng.randint(0, 60)
        if rng.random() < 0.7:
            byte_ranges.append((offset, memoryview(file)[offset : offset + length]))
        offset += length
    expected = bytearray(len(file))
    for begin, view in byte_ranges:
        expected[begin : begin + view.nbytes] = view
    # What begins before the file's end may be given later: HDF5's own structures come first.
    batch = WriteBatch([*byte_ranges[5:], *byte_ranges[:5]], max_bytes=max_bytes)
    found = bytearray(len(file))
    batch.fill()
    while (now := batch.reach) is not None:
        assert now.num_bytes <= max_bytes
        until = rng.choice([None, now.begin + 1, now.end])
        for begin, data in joined(batch.take(until=until)):
            assert until is None or begin + len(data) <= until
            found[begin : begin + len(data)] = data.tobytes()
        batch.fill()
    assert found == expected


def test_a_limit_is_kept_and_loses_nothing() -> None:
    data = memoryview(bytes(range(200)) * 100)
    byte_ranges = [(offset, data[offset : offset + 500]) for offset in range(0, len(data), 500)]
    begin_s = time.monotonic()
    assert list(paced(byte_ranges, limit_bytes_per_s=200_000)) == byte_ranges
    assert time.monotonic() - begin_s >= 0.08  # 20 KB; what comes last is not waited for


@pytest.mark.parametrize("num_writers", [1, 3, 9])
@pytest.mark.parametrize("block_bytes", [1, 64, 4096])
def test_every_byte_of_a_window_is_dealt_to_one_writer(num_writers: int, block_bytes: int) -> None:
    rng = random.Random(num_writers)
    file = bytes(rng.randrange(256) for _ in range(3000))
    for num_ranks in (1, 2, 5):
        begin, until = sorted(rng.sample(range(len(file)), 2))
        places = domains(
            begin=begin, until=until, num_ranks=num_ranks, num_writers=num_writers, block_bytes=block_bytes
        )
        assert (places[0], places[-1], len(places)) == (begin, until, num_ranks + 1)
        assert places == sorted(places)
        assert sum(a < b for a, b in itertools.pairwise(places)) <= num_writers
        assert all(place % block_bytes == 0 for place in places if place not in (begin, until))
        byte_ranges = [
            (offset, memoryview(file)[offset : min(offset + 37, until)]) for offset in range(begin, until, 50)
        ]
        parts = dealt(byte_ranges, places=places)
        for part, (first, stop) in zip(parts, itertools.pairwise(places), strict=True):
            assert all(first <= offset and offset + view.nbytes <= stop for offset, view in part)
            assert all(view == file[offset : offset + view.nbytes] for offset, view in part)
        assert sum(view.nbytes for part in parts for _, view in part) == sum(v.nbytes for _, v in byte_ranges)


def test_one_rank_writes_directly_with_a_note_that_it_has_no_mpi(tmp_path: Path) -> None:
    world = SerialWorld()
    choice = choose_engine(Engine.AUTO, directory=tmp_path, comm=world)
    assert (choice.engine, choice.note) == (Engine.DIRECT, "there is only one rank")
    with pytest.raises(CheckpointError, match="the serial backend has no MPI ranks: use direct or auto"):
        choose_engine(Engine.MPIO, directory=tmp_path, comm=world)
    with pytest.raises(UsageError, match="which a background thread cannot"):
        choose_engine(Engine.MPIO, directory=tmp_path, comm=world, in_background=True)


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `lfs` in PATH that writes down its arguments; what it writes them to. It fails for paths with `bad`."""
    written = tmp_path / "arguments"
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> "{written}"\n'
        'case "$*" in *bad*) echo "error: no such\n   device" >&2; exit 5;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return written


def test_lustre_is_asked_to_stripe_and_a_failure_is_a_note(tmp_path: Path, lfs: Path) -> None:
    path = tmp_path / "data.h5"
    assert set_stripes(path, stripes=Stripes(count=8), filesystem=LUSTRE) is None
    note = set_stripes(tmp_path / "bad", stripes=Stripes(count=1), filesystem=LUSTRE)
    assert note == "lfs setstripe ended with 5: error: no such device"
    assert lfs.read_text().splitlines() == [
        f"setstripe -c 8 -S 4194304 {path}",
        f"setstripe -c 1 -S 4194304 {tmp_path / 'bad'}",
    ]
    assert alignment_of(LUSTRE) == 4 << 20


def test_other_filesystems_are_not_striped(tmp_path: Path, lfs: Path) -> None:
    assert (
        set_stripes(tmp_path / "data.h5", stripes=Stripes(count=8), filesystem=Filesystem(kind="nfs4"))
        is None
    )
    assert not lfs.exists()
    assert alignment_of(Filesystem(kind="nfs4")) == 4096


def test_lustre_without_its_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "lfs is not in PATH" in str(
        set_stripes(tmp_path / "x", stripes=Stripes(count=1), filesystem=LUSTRE)
    )
    assert alignment_of(LUSTRE) == 1 << 20


@pytest.mark.parametrize(
    ("file_bytes", "count"),
    [(0, 1), (1, 1), (128 << 20, 1), ((128 << 20) + 1, 2), (1 << 30, 8), (1 << 40, 64)],
)
def test_larger_files_are_spread_over_more_servers(file_bytes: int, count: int) -> None:
    stripes = stripes_for(file_bytes)
    assert stripes.count == count
    assert stripes.hints(num_ranks=4)["cb_nodes"] == str(min(4, count))
