"""Chunked, compressed and otherwise scattered fields are read as h5py reads them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import Dataset, pack_arrays, pack_tokens
from hpctrain.data.hdf5.filters import fletcher32
from hpctrain.data.indexing.index_files import index_files
from hpctrain.data.reading import chunked as sources
from hpctrain.data.reading.field_reader import ChunkCache, ChunkKey, DecodedChunk
from hpctrain.errors import DataError, UsageError

NUM_SAMPLES = 90
RANDOM = np.random.default_rng(3)
ARRAYS = {
    "image": RANDOM.integers(0, 50, (NUM_SAMPLES, 3, 30, 17), dtype=np.uint8),
    "wave": RANDOM.integers(0, 9, (NUM_SAMPLES, 700)).astype(np.float32),  # copied by row
    "label": np.arange(NUM_SAMPLES),
}
CHUNKS = {"image": (7, 2, 30, 8), "wave": (1, 512), "label": (16,)}


def plugin(name: str, **options: Any) -> dict[str, Any]:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    return dict(getattr(hdf5plugin, name)(**options))


WRITTEN: dict[str, Any] = {
    "uncompressed": dict,
    "gzip": lambda: {"compression": "gzip"},
    "gzip, shuffle, fletcher32": lambda: {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "fletcher32": lambda: {"fletcher32": True},
    "lzf": lambda: {"compression": "lzf"},
    "zstd": lambda: plugin("Zstd"),
    "blosc": lambda: plugin("Blosc", cname="lz4", shuffle=1),
    "bitshuffle": lambda: plugin("Bitshuffle"),
    "big-endian gzip": lambda: {"compression": "gzip", "shuffle": True, "order": ">"},
}


def rewrite(directory: Path, *, order: str = "<", **options: Any) -> None:
    for path in sorted(directory.glob("shard-*.h5")):
        with h5py.File(path) as file:
            content = {name: file[name][:] for name in file}
        with h5py.File(path, "w") as file:
            for name, array in content.items():
                stored = array.astype(array.dtype.newbyteorder(order))
                chunks = tuple(min(pair) for pair in zip(array.shape, CHUNKS[name], strict=True))
                file.create_dataset(name, data=stored, chunks=chunks, **options)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack_arrays(tmp_path / "data", ARRAYS, shard_samples=40)
    return tmp_path / "data"


@pytest.mark.parametrize("written", WRITTEN)
def test_every_filter_gives_what_was_written(packed: Path, written: str) -> None:
    rewrite(packed, **WRITTEN[written]())
    for threads, cache_bytes in ((1, 0), (3, 60_000)):
        dataset = Dataset.open(packed, decode_threads=threads, cache_bytes=cache_bytes)
        for indices in (np.array([89, 0, 41, 41, 7]), RANDOM.permutation(NUM_SAMPLES), np.arange(38, 44)):
            found = dataset.gather(indices)
            for name, array in ARRAYS.items():
                assert found[name].dtype == array.dtype
                assert np.array_equal(found[name], array[indices]), name
        assert dataset._cache.used_bytes <= cache_bytes


def test_a_chunk_is_decoded_once_per_batch_and_not_again_while_it_is_kept(packed: Path) -> None:
    rewrite(packed, compression="gzip")
    dataset = Dataset.open(packed, cache_bytes=10 << 20)
    dataset.gather(np.arange(7).repeat(3))
    made = (
        2 * 3 + 7 * 2 + 1
    )  # image: two halves of the channels, three columns; wave: two chunks a row; label
    assert dataset._cache.num_made == made
    dataset.gather(np.arange(6, -1, -1))
    assert dataset._cache.num_made == made
    unkept = Dataset.open(packed, cache_bytes=0)
    for _ in range(2):
        unkept.gather(np.arange(7))
    assert unkept._cache.num_made == 2 * made


def test_many_chunks_are_not_looked_up_one_by_one(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(packed, compression="gzip")
    monkeypatch.setattr(sources, "_MAX_LOOKED_UP", 4)
    monkeypatch.setattr(
        sources, "read_chunk_index", lambda *_, **__: None
    )  # as of a file with another kind of it
    looked_up: list[Any] = []
    monkeypatch.setattr(sources.StoredChunks, "_place", lambda self, first: looked_up.append(first))
    found = Dataset.open(packed).gather(np.array([80, 3]))
    assert looked_up == [(0,), (0,)]  # of `label`, which has three chunks, in each of the two shards
    assert np.array_equal(found["wave"], ARRAYS["wave"][[80, 3]])


def test_chunks_never_written_are_fill_and_filters_left_out_are_respected(packed: Path) -> None:
    path = packed / "shard-00000.h5"
    with h5py.File(path, "a") as file:
        del file["wave"]
        wave = file.create_dataset(
            "wave", (40, 700), "f4", chunks=(10, 700), compression="gzip", shuffle=True, fillvalue=-2.5
        )
        wave.id.write_direct_chunk((10, 0), ARRAYS["wave"][10:20].tobytes(), filter_mask=0b11)
    found = Dataset.open(packed).gather(np.arange(25))["wave"]
    assert np.all(found[:10] == -2.5)
    assert np.array_equal(found[10:20], ARRAYS["wave"][10:20])
    assert np.all(found[20:] == -2.5)


def test_plugins_are_found_without_being_imported_and_missing_ones_are_named(packed: Path) -> None:
    rewrite(packed, **plugin("Bitshuffle"))
    program = (
        "import sys, numpy as np\n"
        "from hpctrain.data import Dataset\n"
        "if sys.argv[2] == 'without':\n"
        "    sys.modules['hdf5plugin'] = None\n"  # as if it were not installed
        "try:\n"
        "    print(Dataset.open(sys.argv[1]).gather(np.array([7]))['label'][0])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environ = {**os.environ, "HDF5_PLUGIN_PATH": str(packed)}  # hdf5plugin's import has set it here
    found = {}
    for which in ("with", "without"):
        command = [sys.executable, "-c", program, str(packed), which]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environ)
        found[which] = done.stdout.strip()
    assert found["with"] == "7"
    assert re.fullmatch(
        r"DataError field '(image|wave)', sample 7 of shard .*shard-00000.h5 cannot be read: /\1 is compressed "
        r"with HDF5 filter 32008 \(bitshuffle\), which is not installed here: pip install hpctrain\[formats\]",
        found["without"],
    )


def test_our_fletcher32_is_that_of_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "sums.h5", "w") as file:
        for size in (1, 2, 3, 719, 720, 721, 131_072, 131_075, 400_001):
            for values in (RANDOM.integers(0, 256, size, dtype=np.uint8), np.full(size, 255, np.uint8)):
                name = f"{size}-{values[0]}-{len(file)}"
                dataset = file.create_dataset(name, data=values, chunks=(size,), fletcher32=True)
                file.flush()
                stored = dataset.id.read_direct_chunk((0,))[1]
                assert fletcher32(values.tobytes()) == int.from_bytes(stored[-4:], "little"), size


def test_a_damaged_chunk_names_shard_field_and_samples(packed: Path) -> None:
    rewrite(packed, compression="gzip", fletcher32=True)
    path = packed / "shard-00001.h5"
    with h5py.File(path) as file:
        place = file["image"].id.get_chunk_info_by_coord((14, 0, 0, 0))
    with path.open("r+b") as file:
        file.seek(place.byte_offset + place.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    dataset = Dataset.open(packed, decode_threads=2)
    assert np.array_equal(dataset.gather(np.arange(40, 54))["image"], ARRAYS["image"][40:54])
    with pytest.raises(
        DataError,
        match=r"field 'image', samples 15 to 18 of shard .*shard-00001.h5 cannot be read: .*Fletcher",
    ):
        dataset.gather(np.array([58, 41, 55]))


def test_a_chunked_file_cut_under_an_open_reader_is_an_error(packed: Path) -> None:
    rewrite(packed, compression="gzip")
    dataset = Dataset.open(packed, cache_bytes=0)
    dataset.gather(np.arange(NUM_SAMPLES))
    os.truncate(packed / "shard-00000.h5", 9000)
    with pytest.raises(
        DataError, match=r"field '\w+', .* of shard .*shard-00000.h5 cannot be read: the file ends"
    ):
        dataset.gather(np.arange(40))


def test_windows_of_a_chunked_stream_are_those_of_the_contiguous_one(tmp_path: Path) -> None:
    stream = RANDOM.integers(0, 60_000, 5000).astype(np.uint16)
    pack_tokens(tmp_path, [stream], window=50, stride=31, dtype="uint16", shard_bytes=4000)
    before = Dataset.open(tmp_path).gather(np.arange(150))["tokens"]
    for path in tmp_path.glob("shard-*.h5"):
        with h5py.File(path) as file:
            tokens = file["tokens"][:]
        with h5py.File(path, "w") as file:
            file.create_dataset("tokens", data=tokens, chunks=(17,), compression="gzip")
    indices = RANDOM.permutation(150)
    assert np.array_equal(Dataset.open(tmp_path).gather(indices)["tokens"], before[indices])


def test_threads_that_want_the_same_chunk_make_it_once() -> None:
    cache = ChunkCache(capacity_bytes=100)
    entered, go = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> DecodedChunk:
        entered.set()
        assert go.wait(300)
        made.append(1)
        return DecodedChunk(values=np.arange(10, dtype=np.uint8))

    key, found = ChunkKey(0, "x", (0,)), []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_make(key, make))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(300)
    go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert all(chunk is found[0] for chunk in found)


def test_the_cache_drops_what_was_used_longest_ago_and_never_holds_more_than_it_may() -> None:
    cache = ChunkCache(capacity_bytes=25)
    keys = [ChunkKey(0, "x", (number,)) for number in range(4)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        cache.get_or_make(key, lambda: DecodedChunk(values=np.zeros(10, np.uint8)))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, False]
    cache.get_or_make(keys[3], lambda: DecodedChunk(values=np.zeros(26, np.uint8)))
    assert (cache.used_bytes, cache.get(keys[3])) == (20, None)
    with pytest.raises(OSError, match="once"):
        cache.get_or_make(keys[1], lambda: (_ for _ in ()).throw(OSError("once")))
    assert cache.get_or_make(keys[1], lambda: DecodedChunk(values=np.ones(1, np.uint8))).num_bytes == 1


def test_a_negative_cache_and_no_threads_are_refused(packed: Path) -> None:
    for options in ({"cache_bytes": -1}, {"decode_threads": 0}):
        with pytest.raises(UsageError, match="at least 0 bytes and 1 thread"):
            Dataset.open(packed, **options)


@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"compression": "gzip", "shuffle": True}, {}])
def test_chunks_of_one_sample_are_read_past_a_small_cache_and_damage_is_named(
    tmp_path: Path, filters: dict[str, Any]
) -> None:
    values = RANDOM.integers(0, 50, (NUM_SAMPLES, 40, 20), dtype=np.int32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=(1, 40, 20), **filters)
        place = dataset.id.get_chunk_info_by_coord((7, 0, 0))
    index_files(tmp_path / "index", files=[str(tmp_path / "a.h5")], fields="x=/x")
    dataset = Dataset.open(tmp_path / "index", cache_bytes=1000)
    order = RANDOM.permutation(NUM_SAMPLES)
    assert np.array_equal(dataset.gather(order)["x"], values[order])
    assert np.array_equal(dataset.gather(np.array([3, 3, 8]))["x"], values[[3, 3, 8]])
    assert dataset._cache.used_bytes == 0
    if "compression" in filters:
        status = (tmp_path / "a.h5").stat()
        with open(tmp_path / "a.h5", "r+b") as raw:
            raw.seek(place.byte_offset)
            raw.write(b"\xff" * 8)
        os.utime(tmp_path / "a.h5", ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(DataError, match=r"sample 7 .*a\.h5"):
            Dataset.open(tmp_path / "index", cache_bytes=1000).gather(order)


def test_decoded_chunks_do_not_keep_the_files_of_shards_open_that_were_closed(tmp_path: Path) -> None:
    pack_arrays(tmp_path, {"x": np.arange(400, dtype=np.int64).reshape(200, 2)}, shard_samples=10)
    for path in tmp_path.glob("shard-*.h5"):
        with h5py.File(path) as file:
            content = file["x"][:]
        with h5py.File(path, "w") as file:  # not compressed: what is stored is what is handed out
            file.create_dataset("x", data=content, chunks=(5, 2))
    dataset = Dataset.open(tmp_path, io="map")
    dataset._max_open = 2

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    dataset.gather(np.arange(20))
    before = num_open()
    assert np.array_equal(dataset.gather(np.arange(200))["x"].ravel(), np.arange(400))
    assert dataset._cache.num_made == 40
    assert num_open() <= before
