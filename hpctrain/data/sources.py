"""What `hpctrain data pack` can read: handwritten digits, Python's own source text, .npz files, text files.

A source is turned into one or two parts, `train` and `test`. The split depends on the seed and on the content
alone, never on the machine: samples by the epoch order's permutation, files by a hash of their relative path.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.order import EpochOrder
from hpctrain.errors import DataError, UsageError

# A byte that no text holds ends each file, so that a model can see where one begins.
DOCUMENT_SEPARATOR = 0
BYTE_VOCABULARY = 256
# Tests and vendored packages of the standard library's directory: repetitive, or not its text.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class ArraySource:
    """Arrays of equal first dimension; parts: part name -> field name -> array."""

    parts: dict[str, dict[str, NDArray[Any]]]
    attributes: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """UTF-8 files, read as streams of bytes; parts: part name -> files in order."""

    parts: dict[str, tuple[Path, ...]]
    attributes: dict[str, JsonValue] = field(default_factory=dict)


def open_source(name: str, *, held_out: float | None, seed: int) -> ArraySource | TextSource:
    """Look a source up by the name given on the command line.

    name: `digits`, `python-source`, a path ending in .npz, a directory of text files (also `text:DIR`).
    held_out: share of the samples or files for the part `test`; None is the source's own default (digits 0.2,
    text 0.1, npz 0). With 0 there is one part, `all`.
    Raises UsageError for an unknown source, DataError for one that cannot be read.
    """
    if held_out is not None and not 0 <= held_out < 1:
        raise UsageError(f"--held-out {held_out}: a share from 0 to below 1 is needed")
    if name == "digits":
        return _digits(held_out=0.2 if held_out is None else held_out, seed=seed)
    if name == "python-source":
        return _python_source(held_out=0.1 if held_out is None else held_out, seed=seed)
    path = Path(name.removeprefix("text:"))
    if path.suffix == ".npz" and not name.startswith("text:"):
        return _npz(path, held_out=held_out or 0.0, seed=seed)
    if path.is_dir():
        return _text_directory(path, held_out=0.1 if held_out is None else held_out, seed=seed)
    raise UsageError(
        f"unknown source {name!r}: digits, python-source, a file X.npz, or a directory of text files "
        "(text:DIR) are possible" + ("" if path.exists() else f"; there is no {path}")
    )


def read_tokens(files: Iterable[Path]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each file with the separator behind it: uint8, shape (size + 1,)."""
    end = np.array([DOCUMENT_SEPARATOR], dtype=np.uint8)
    for path in files:
        try:
            yield np.concatenate([np.frombuffer(path.read_bytes(), dtype=np.uint8), end])
        except OSError as error:
            raise DataError(f"the text file {path} cannot be read: {error}") from error


def _split_arrays(
    fields: dict[str, NDArray[Any]], *, held_out: float, seed: int
) -> dict[str, dict[str, NDArray[Any]]]:
    if held_out == 0:
        return {"all": fields}
    num_samples = min(len(array) for array in fields.values())
    num_test = round(num_samples * held_out)
    if not 0 < num_test < num_samples:
        raise UsageError(f"--held-out {held_out} of {num_samples} samples leaves one part empty")
    order = EpochOrder(num_samples=num_samples, seed=seed).at(0, num_samples)
    chosen = {"train": order[num_test:], "test": order[:num_test]}
    return {part: {name: array[rows] for name, array in fields.items()} for part, rows in chosen.items()}


def _digits(*, held_out: float, seed: int) -> ArraySource:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the source 'digits' comes with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None, :, :]  # (1797, 1, 8, 8), grey values 0 to 16
    fields = {"image": images, "label": bunch.target.astype(np.int64)}
    return ArraySource(
        parts=_split_arrays(fields, held_out=held_out, seed=seed),
        attributes={"source": "digits", "num_classes": 10, "seed": seed},
    )


def _npz(path: Path, *, held_out: float, seed: int) -> ArraySource:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"the source {path} does not exist") from None
    except Exception as error:  # zip, zlib and numpy each have their own for a damaged file
        raise DataError(f"the source {path} cannot be read as .npz without pickle: {error}") from error
    if any(array.ndim == 0 for array in fields.values()) or not fields:
        raise DataError(f"the source {path} needs arrays of equal first dimension, one entry a sample")
    lengths = {name: len(array) for name, array in fields.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the arrays of {path} differ in their number of samples: {lengths}")
    return ArraySource(
        parts=_split_arrays(fields, held_out=held_out, seed=seed),
        attributes={"source": path.name, "seed": seed},
    )


def _split_files(root: Path, names: list[str], *, held_out: float, seed: int) -> dict[str, tuple[Path, ...]]:
    """Held out: files whose hashed path is below the share. The others stay when a file is added."""
    names = sorted(names)
    if held_out == 0:
        return {"all": tuple(root / name for name in names)}
    hashes = {name: xxhash.xxh3_64_intdigest(name.encode(), seed=seed) for name in names}
    test = {name for name in names if hashes[name] < held_out * 2**64}
    if len(names) < 2:
        raise UsageError(f"--held-out {held_out} needs at least 2 files, {root} has {len(names)}")
    # Few files: hold out the one that is next, rather than none or all of them.
    if not test:
        test = {min(names, key=hashes.__getitem__)}
    elif len(test) == len(names):
        test.remove(max(names, key=hashes.__getitem__))
    return {
        "train": tuple(root / name for name in names if name not in test),
        "test": tuple(root / name for name in names if name in test),
    }


def _is_text(path: Path) -> bool:
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise DataError(f"the text file {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        return False
    return bool(data) and DOCUMENT_SEPARATOR not in data


def _text_source(root: Path, paths: list[Path], *, held_out: float, seed: int, source: str) -> TextSource:
    names = [path.relative_to(root).as_posix() for path in paths if _is_text(path)]
    if not names:
        raise DataError(f"{root} holds no UTF-8 text files (looked at {len(paths)} files)")
    return TextSource(
        parts=_split_files(root, names, held_out=held_out, seed=seed),
        attributes={
            "source": source,
            "vocabulary": BYTE_VOCABULARY,
            "document_separator": DOCUMENT_SEPARATOR,
            "skipped_files": len(paths) - len(names),
            "seed": seed,
        },
    )


def _text_directory(root: Path, *, held_out: float, seed: int) -> TextSource:
    paths = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    return _text_source(root, paths, held_out=held_out, seed=seed, source=f"text:{root.name}")


def _python_source(*, held_out: float, seed: int) -> TextSource:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
    ]
    version = "Python {}.{}.{}".format(*sys.version_info[:3])
    return _text_source(root, paths, held_out=held_out, seed=seed, source=f"python-source ({version})")
