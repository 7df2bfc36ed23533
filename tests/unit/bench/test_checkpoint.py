"""`hpctrain bench checkpoint` on one rank: what it writes and reads, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from hpctrain.bench.checkpoint.measure import CheckpointAsked, measure_checkpoint, take_turns
from hpctrain.bench.checkpoint.methods import Loading, MethodTime, RawShare, SyncSaving, make_state
from hpctrain.bench.page_cache import Cache, cached_share
from hpctrain.cli.bench.group import bench_app
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError, UsageError


def asked(**changes: object) -> CheckpointAsked:
    settings: dict[str, object] = {"num_bytes": 300_000, "num_tensors": 5, "repeats": 2, **changes}
    return CheckpointAsked(**settings)  # type: ignore[arg-type]


def test_a_state_has_the_bytes_and_tensors_asked_for_and_the_same_ones_each_time() -> None:
    state = make_state(num_bytes=100_003, num_tensors=7, seed=1)
    assert state.num_bytes == 100_000
    assert len(state.tensors) == 7
    assert len({tensor.nbytes // 4 for tensor in state.tensors}) <= 2
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.tensors}) == 7
    again, other = (make_state(num_bytes=100_003, num_tensors=7, seed=seed) for seed in (1, 2))
    assert b"".join(v.tobytes() for v in state.views()) == b"".join(v.tobytes() for v in again.views())
    assert state.views()[0].tobytes() != other.views()[0].tobytes()


@pytest.mark.parametrize("num_tensors", [1, 3, 2500])
def test_raw_shares_make_up_the_states_bytes_each_once(tmp_path: Path, num_tensors: int) -> None:
    state = make_state(num_bytes=1 << 20, num_tensors=num_tensors)
    shares = [RawShare(state, rank=rank, num_ranks=3) for rank in range(3)]
    shares[0].create(tmp_path / "raw")
    for share in reversed(shares):
        share.write(tmp_path / "raw")
    whole = b"".join(view.tobytes() for view in state.views())
    assert (tmp_path / "raw").read_bytes() == whole
    assert [share.begin for share in shares] == [0, *(share.end for share in shares[:-1])]
    assert max(share.num_bytes for share in shares) - min(share.num_bytes for share in shares) <= 8192
    read = shares[1].read(tmp_path / "raw")
    assert [len(array) for array in read] == [tensor.nbytes for tensor in state.tensors]
    assert np.concatenate(read).tobytes() == whole
    with pytest.raises(FileExistsError):
        shares[0].create(tmp_path / "raw")
    (tmp_path / "raw").write_bytes(whole[:-1])
    with pytest.raises(OSError, match="bytes were read"):
        shares[0].read(tmp_path / "raw")


def test_a_raw_copy_has_the_shares_bytes() -> None:
    state = make_state(num_bytes=1 << 20, num_tensors=3)
    share = RawShare(state, rank=1, num_ranks=2)
    share.prepare_copy()
    share.copy()
    whole = b"".join(view.tobytes() for view in state.views())
    assert share._copy.tobytes() == whole[share.begin : share.end]


def test_every_way_is_measured_and_what_was_written_to_is_removed_but_for_what_is_read(
    tmp_path: Path,
) -> None:
    reported: list[float] = []
    measured = measure_checkpoint(
        asked(engines=("auto", "direct")), comm=SerialWorld(), directory=tmp_path, progress=reported.append
    )
    rows = {row.what: row for row in measured.rows}
    assert list(rows) == [
        "raw write", "save, auto", "save, direct", "save in a run, auto", "save in a run, direct",
        "save async, auto", "save async, direct", "memcpy", "raw read", "load, verified",
    ]  # fmt: skip
    assert {name for name, row in rows.items() if row.engine == "direct"} == set(list(rows)[1:7])
    for row in measured.rows:
        assert len(row.samples_s) == 2
        assert row.bytes_per_s == pytest.approx(300_000 / row.seconds.median)
        assert len(row.stalls_s) == (2 if "async" in row.what else 0)
        if row.stall is not None:
            assert row.stall.max <= row.seconds.max
            copies = rows["memcpy"].samples_s
            of_copy = [stall / copy for stall, copy in zip(row.stalls_s, copies, strict=True)]
            assert row.stall_of_copy == pytest.approx(sum(of_copy) / 2)
        if row.raw is not None:
            raw = rows[row.raw].samples_s
            shares = sorted(r / own for r, own in zip(raw, row.samples_s, strict=True))
            assert row.share_of_raw == pytest.approx(sum(shares) / 2)
    assert rows["raw write"].share_of_raw is None
    assert measured.rank_bytes == [300_000]
    assert [note for note in measured.notes if "too few to measure a disk:" in note]
    assert reported == sorted(reported)
    assert (reported[0], reported[-1]) == (0, 1)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("[!.]*") if path.is_file())
    # Two to begin with, one round that does not count, and two.
    runs = [f"run-{engine}/step-00000005.h5" for engine in ("auto", "direct")]
    assert left == ["load/step-00000001.h5", "raw-read", *runs]


def test_what_is_saved_and_loaded_is_the_state(tmp_path: Path) -> None:
    state = make_state(num_bytes=100_000, num_tensors=3)
    world = SerialWorld()
    loading = Loading(state.state, comm=world, directory=tmp_path, cold=True)
    assert loading.turn().seconds > 0
    (path,) = (tmp_path / "load").iterdir()
    assert cached_share([path]) is not None
    damaged = bytearray(path.read_bytes())
    place = damaged.index(state.views()[1].tobytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"layer\.000001\.weight"):
        loading.turn()
    with pytest.raises(UsageError, match="engine"):
        SyncSaving(state.state, engine="fast", comm=world, directory=tmp_path).turn()


def test_rounds_take_every_way_once_in_changing_order_and_the_first_do_not_count() -> None:
    taken: list[str] = []

    class Counting:
        engine, raw = None, None

        def __init__(self, name: str) -> None:
            self.name = name

        def turn(self) -> MethodTime:
            taken.append(self.name)
            return MethodTime(seconds=float(len(taken)))

    found = take_turns([Counting(name) for name in "abc"], repeats=6, warmup=1, seed=0)
    rounds = [taken[start : start + 3] for start in range(0, 21, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert {name: len(turns) for name, turns in found.items()} == {"a": 6, "b": 6, "c": 6}
    assert min(turn.seconds for turns in found.values() for turn in turns) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bytes": 19}, "19 bytes cannot be 5 tensors"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"engines": ("swift",)}, "swift"),
        ({"page_cache": "never"}, "--page-cache 'never'"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(**changes)


def test_a_state_that_memory_does_not_hold_is_refused_before_it_is_made(tmp_path: Path) -> None:
    too_much = psutil.virtual_memory().total
    with pytest.raises(UsageError, match=r"1 rank on .* need .* GB of memory"):
        measure_checkpoint(asked(num_bytes=too_much), comm=SerialWorld(), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_a_table_writes_json_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    (tmp_path / "disk").mkdir()
    words = [
        "checkpoint",
        "--size",
        "1MiB",
        "--tensors",
        "3",
        "--repeats",
        "2",
        "--cold",
        "--backend",
        "serial",
    ]
    result = CliRunner().invoke(
        bench_app, [*words, "--directory", str(tmp_path / "disk"), "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert "checkpoints of 1 MiB in 3 tensors: 1 node x 1 rank, serial, cold cache" in " ".join(
        result.stdout.split()
    )
    document = json.loads(path.read_text())
    assert document["schema"] == "hpctrain.bench.checkpoint/1"
    assert document["bytes"] == 1 << 20
    assert document["settings"]["cache"] == Cache.COLD.value
    assert document["ways"][0]["what"] == "raw write"
    assert all(len(way["samples_s"]) == 2 for way in document["ways"])
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--directory", "nowhere"], "nowhere is not a folder"),
        (["--size", "many"], "'many' is no size"),
        (["--engines", "direct,swift"], "swift"),
        (["--modes", "async,later"], "--modes 'later' is not one of sync, async"),
    ],
)
def test_options_that_cannot_be_are_refused(words: list[str], reported: str) -> None:
    result = CliRunner().invoke(bench_app, ["checkpoint", *words])
    assert isinstance(result.exception, UsageError)
    assert reported in str(result.exception)
