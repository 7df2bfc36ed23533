"""Every way into an HDF5 file that is indexed in place, each in a process of its own that has not loaded hdf5plugin.

    python -m tests.unit.data.hdf5.filter_readers DIRECTORY [without]

Each file of the directory goes each way, in a fork of this process. `without`: as if hdf5plugin and numcodecs were not
installed. Prints one JSON object: file -> way -> "ok", or the class and text of the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import Dataset, verify_dataset
from hpctrain.data.indexing.index_files import IndexReading, OldIndex, TokenRequest, index_files
from hpctrain.data.integrity.read_checker import check_while_reading
from hpctrain.data.locality.memory_store import MemoryStore
from hpctrain.data.locality.staged_dataset import StagedDataset

NUM_SAMPLES = 40
IMAGES = np.random.default_rng(5).integers(0, 50, (NUM_SAMPLES, 12, 16)).astype(np.float32)
SITES = np.array([b"north", b"south", b"west", b"east"] * 10)
CLASSES = ("east", "north", "south", "west")
TOKENS = np.arange(1000, dtype=np.int32)
STARTS = np.array([0, 300, 700])
ORDER = np.random.default_rng(6).permutation(NUM_SAMPLES)


def right(samples: Dataset | MemoryStore | StagedDataset) -> None:
    """Samples in any order are what was written."""
    found = samples.gather(ORDER)
    assert np.array_equal(found["x"], IMAGES[ORDER])
    assert [CLASSES[number].encode() for number in found["y"]] == SITES[ORDER].tolist()


def hashed(path: Path) -> None:
    index_files(
        path.with_suffix(".hashed"), files=[str(path)], fields="x=/x,y=/y", reading=IndexReading.CONTENT,
        block_bytes=1000, old=OldIndex.REPLACE,
    )  # fmt: skip
    statistics = Dataset.open(path.with_suffix(".hashed")).manifest.statistics["x"]
    assert abs(statistics.mean - IMAGES.mean()) < 1e-3
    assert statistics.max == 49


def headers(path: Path) -> None:
    """Without hashes; strings are read all the same, for the names of the classes."""
    index_files(path.with_suffix(".headers"), files=[str(path)], fields="x=/x,y=/y", old=OldIndex.REPLACE)
    right(Dataset.open(path.with_suffix(".headers")))


def tokens(path: Path) -> None:
    where = path.with_suffix(".tokens")
    index_files(
        where, files=[str(path)], fields="tokens=/tokens", reading=IndexReading.CONTENT, old=OldIndex.REPLACE,
        tokens=TokenRequest(window=50, stride=50, documents="/starts"),
    )  # fmt: skip
    found = Dataset.open(where).gather(np.array([0, 4, 5]))["tokens"]
    # Of 300 tokens windows of 51 begin at 0, 50, ..., 200; the next document begins at 300.
    assert np.array_equal(found, np.array([[0], [200], [300]]) + np.arange(51))


def gathered(path: Path) -> None:
    right(Dataset.open(path.with_suffix(".hashed")))


def checked(path: Path) -> None:
    dataset = Dataset.open(path.with_suffix(".hashed"))
    check_while_reading(dataset, mode="always")
    right(dataset)


def sound(path: Path) -> None:
    """What `on_damage = "skip"` asks: data that cannot be decoded here are not damaged."""
    dataset = Dataset.open(path.with_suffix(".hashed"))
    check_while_reading(dataset, mode="first-epoch")
    assert dataset.checker is not None
    assert dataset.checker.sound(ORDER).all()  # type: ignore[attr-defined]


def verified(path: Path) -> None:
    assert verify_dataset(path.with_suffix(".hashed")) == []


def staged(path: Path) -> None:
    original = Dataset.open(path.with_suffix(".hashed"))
    with StagedDataset.open(original, directory=path.with_suffix(".local"), max_bytes=1 << 30) as copies:
        assert copies.wait_until_staged(timeout_s=300) == 1
        assert copies.problems == {}
        right(copies)


def in_memory(path: Path) -> None:
    right(MemoryStore.load(SerialWorld(), Dataset.open(path.with_suffix(".hashed"))))


WAYS: tuple[Callable[[Path], None], ...] = (
    headers, hashed, tokens, gathered, checked, sound, verified, staged, in_memory,
)  # fmt: skip


def in_a_fork(way: Callable[[Path], None], path: Path) -> str:
    assert "hdf5plugin" not in sys.modules or sys.modules["hdf5plugin"] is None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            way(path)
            text = "ok"
        except BaseException as error:
            text = f"{type(error).__name__} {error}"
        os.write(writing, text.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def main() -> None:
    if sys.argv[2:] == ["without"]:
        sys.modules["hdf5plugin"] = sys.modules["numcodecs"] = None  # type: ignore[assignment]
    paths = sorted(Path(sys.argv[1]).glob("*.h5"))
    print(json.dumps({path.stem: {way.__name__: in_a_fork(way, path) for way in WAYS} for path in paths}))


if __name__ == "__main__":
    main()
