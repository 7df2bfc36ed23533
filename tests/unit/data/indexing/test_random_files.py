"""Random valid HDF5 files are read as h5py reads them, or refused by name."""

from __future__ import annotations

import collections
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.data import Dataset, IndexReading, SampleIs, ValuesWarning, index_files, verify_dataset
from hpctrain.errors import DataError
from tests.unit.data.hdf5.h5py_reads import wanted
from tests.unit.data.hdf5.random_attributes import Said, meant
from tests.unit.data.hdf5.random_files import CannotMakeError, DrawnFile, make_file

# Number of files of the thorough test, and the number of the first: three minutes for 20,000 on a free core.
COUNT = int(os.environ.get("HPCTRAIN_RANDOM_FILES", "20000"))
FIRST = int(os.environ.get("HPCTRAIN_RANDOM_FIRST", "0"))


def same(found: NDArray[Any], right: NDArray[Any]) -> bool:
    """Equal to the bit, but for the byte order. Any byte but 0 is true."""
    if found.dtype == bool:
        found, right = found.view(np.uint8) != 0, np.asarray(right).view(np.uint8) != 0
    native = np.ascontiguousarray(right.astype(found.dtype, copy=False))
    return (
        right.dtype.newbyteorder("=") == found.dtype
        and found.shape == right.shape
        and found.tobytes() == native.tobytes()
    )


def outcome(folder: Path, *, number: int, make: Callable[..., DrawnFile] = make_file) -> tuple[str, str]:
    """Returns "equal", "refused", "not made" or "WRONG", and what was made and found."""
    # Each has its own name: HDF5 keeps a file open that it could not write.
    path, out = folder / f"{number}.h5", folder / "index"
    try:
        return _outcome(path, out, number=number, make=make)
    finally:
        for one in folder.glob(f"{number}.h5*"):
            one.unlink()


def _outcome(path: Path, out: Path, *, number: int, make: Callable[..., DrawnFile]) -> tuple[str, str]:
    try:
        made = make(path, number=number)
    except CannotMakeError as error:
        return "not made", str(error)
    random = np.random.default_rng(number)
    right = wanted(path, made)
    shutil.rmtree(out, ignore_errors=True)
    try:
        whole = right is not None and (right.ndim == 0 or random.random() < 0.2)
        hashed = random.random() < 0.4
        decode = random.choice([None, "raw", "cf"])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ValuesWarning)
            index_files(
                out,
                files=[str(path)],
                fields=made.fields,
                samples=SampleIs.FILE if whole else SampleIs.ROWS,
                reading=IndexReading.CONTENT if hashed else IndexReading.HEADERS,
                decode=decode,
            )
        io = str(random.choice(["map", "read"]))
        dataset = Dataset.open(out, io=io, cache_bytes=int(random.choice([0, 1000, 1 << 24])))
        if hashed and verify_dataset(out):
            return "WRONG", f"{made.description}: a sound file is called damaged: {verify_dataset(out)[0]}"
        values = None if right is None else decoded(path, right, made.said)
        if decode == "cf" and values is not None:
            fault = differs_decoded(dataset, values, whole=whole)
        elif decode is None and not warned and means_something_else(right, values, made.said):
            fault = "its numbers are not its values, and there is no warning"
        else:
            fault = differences(dataset, right, whole=whole, random=random)
        return ("WRONG", f"{made.description}: {fault}") if fault else ("equal", made.description)
    except DataError as error:
        is_named = str(path) in str(error) and any(name in str(error) for name in ("/x", "'x'", "/group/y"))
        return "refused" if is_named else "WRONG", f"{made.description}: {error}"
    except Exception as error:
        return "WRONG", f"{made.description}: {type(error).__name__}: {error}"


def differences(
    dataset: Dataset, right: NDArray[Any] | None, *, whole: bool, random: np.random.Generator
) -> str:
    """Reads in several orders. Returns what differs, or ""."""
    if right is None:
        dataset.gather(np.arange(len(dataset)))
        return "h5py cannot read it, and it is not refused"
    spec = dataset.fields["x"]
    if spec.kind == "ragged" and not whole:
        batch = dataset.gather(np.arange(len(right)))
        rows = [row[:length] for row, length in zip(batch["x"], batch["x.length"], strict=True)]
        equal = all(same(row, np.asarray(wanted)) for row, wanted in zip(rows, right, strict=True))
        return "" if equal else f"{rows} instead of {right}"
    if spec.kind == "classes":
        right = np.array(
            [spec.classes.index(text_of(value)) for value in np.atleast_1d(right)], dtype=np.int64
        )
        right = right.reshape(()) if whole else right
    samples = right[None] if whole else right
    orders = [np.arange(len(samples)), random.integers(0, len(samples), 2 * len(samples))]
    orders += [np.array([number]) for number in random.integers(0, len(samples), 3)]
    for order in orders:
        found = dataset.gather(order)["x"]
        if not same(found, samples[order]):
            return (
                f"{found.reshape(-1)[:8]} instead of {samples[order].reshape(-1)[:8]} for samples {order[:8]}"
            )
    return ""


def decoded(path: Path, right: NDArray[Any], said: Said) -> NDArray[np.float64] | None:
    """Returns the values that attributes and a mask say; None if they say nothing of it."""
    if said.of_table or not (said.attributes or said.mask):
        return None
    with h5py.File(path, "r") as file:
        return meant(right, said, file[said.mask][...] if said.mask else None)


def means_something_else(right: NDArray[Any] | None, values: NDArray[np.float64] | None, said: Said) -> bool:
    if right is None or values is None:  # text has no scale
        return said.of_table and (right is None or right.dtype.kind in "iuf")
    return not np.array_equal(right.astype(np.float64), values, equal_nan=True)


def differs_decoded(dataset: Dataset, values: NDArray[np.float64], *, whole: bool) -> str:
    found = dataset.gather(np.arange(len(dataset)))["x"]
    wanted = values[None] if whole else values
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = wanted.astype(found.dtype) if found.dtype.kind == "f" else wanted
    if found.shape == wanted.shape and np.allclose(
        found.astype(np.float64), wanted.astype(np.float64), rtol=1e-5 if found.itemsize <= 4 else 1e-12,
        atol=1e-5 if found.itemsize <= 4 else 1e-12, equal_nan=True,
    ):  # fmt: skip
        return ""
    return f"decoded {found.reshape(-1)[:8]} instead of {wanted.reshape(-1)[:8]}"


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def run(folder: Path, *, first: int, count: int) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    wrong, number = [], first
    while sum(counts.values()) - counts["not made"] < count:
        said, text = outcome(folder, number=number)
        counts[said] += 1
        number += 1
        if said == "WRONG":
            wrong.append(text)
    print(dict(counts))
    assert not wrong, f"{len(wrong)} files, the first: " + "\n".join(wrong[:10])
    return counts


def test_300_random_files_are_read_as_h5py_reads_them_or_refused_by_name(tmp_path: Path) -> None:
    counts = run(tmp_path, first=1_000_000, count=300)
    assert counts["equal"] > 150
    assert counts["refused"] > 10


@pytest.mark.thorough
@pytest.mark.timeout(7200)
def test_20000_random_files_are_read_as_h5py_reads_them_or_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, first=FIRST, count=COUNT)
