"""Text files as sources. Each file is a document of bytes, followed by a separator byte that does not occur in text."""

from __future__ import annotations

import codecs
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.sources.row_source import source_identity
from hpctrain.errors import DataError, UsageError

# This byte, which does not occur in text, follows each file, so that a model can see where a file begins.
DOCUMENT_SEPARATOR = 0
BYTE_VOCABULARY = 256
_READ_BYTES = 1 << 20
# Directories of the standard library that are skipped: repetitive (tests), or not part of it.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """UTF-8 text files that can be packed as token streams, in which each byte is a token.

    `parts` maps the name of each part, such as `train` and `test`, to its files.
    """

    parts: dict[str, tuple[Path, ...]]
    attributes: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class TextDocuments:
    """Text files as tokenized documents, in which each byte is a token (uint8).

    A document consists of the bytes of one file, followed by a separator byte that does not occur in text.
    """

    files: tuple[Path, ...]
    dtype: str = "uint8"

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        try:
            sizes = [path.stat().st_size + 1 for path in self.files]
        except OSError as error:
            raise DataError(f"a text file cannot be read: {error}") from error
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def identity(self) -> JsonValue:
        return source_identity(self.files)

    def read(self, number: int, *, start: int, stop: int) -> NDArray[np.uint8]:
        path = self.files[number]
        length = int(self.starts[number + 1] - self.starts[number])
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(min(stop, length - 1) - start)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"the text file {path} cannot be read: {error}") from error
        if size != length - 1:
            raise DataError(
                f"the text file {path} has {size} bytes, it had {length - 1} at the start of packing"
            )
        tokens = np.full(stop - start, DOCUMENT_SEPARATOR, dtype=np.uint8)
        tokens[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return tokens


def read_tokens(files: Iterable[Path]) -> Iterator[NDArray[np.uint8]]:
    """Yields one array per file, with the bytes of the file and then the separator: uint8, shape (file size + 1,)."""
    end = np.array([DOCUMENT_SEPARATOR], dtype=np.uint8)
    for path in files:
        try:
            yield np.concatenate([np.frombuffer(path.read_bytes(), dtype=np.uint8), end])
        except OSError as error:
            raise DataError(f"the text file {path} cannot be read: {error}") from error


def _split_files(root: Path, names: list[str], *, held_out: float, seed: int) -> dict[str, tuple[Path, ...]]:
    """Divides the files `names` below `root` into the parts `train` and `test`. Returns the files of each part.

    If `held_out` is 0, there is one part, `all`. A file goes into `test` if a hash of its path and the seed, seen as a
    number in [0, 1), is below `held_out`. So an additional file does not move other files to another part.
    """
    names = sorted(names)
    if held_out == 0:
        return {"all": tuple(root / name for name in names)}
    hashes = {name: xxhash.xxh3_64_intdigest(name.encode(), seed=seed) for name in names}
    test = {name for name in names if hashes[name] < held_out * 2**64}
    if len(names) < 2:
        raise UsageError(f"--held-out {held_out} needs at least 2 files, {root} has {len(names)}")
    # With few files, avoid an empty part: move the file whose hash is nearest to the limit.
    if not test:
        test = {min(names, key=hashes.__getitem__)}
    elif len(test) == len(names):
        test.remove(max(names, key=hashes.__getitem__))
    return {
        "train": tuple(root / name for name in names if name not in test),
        "test": tuple(root / name for name in names if name in test),
    }


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    empty = True
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                decoder.decode(data)
                if DOCUMENT_SEPARATOR in data:
                    return False
                empty = False
        decoder.decode(b"", final=True)
    except OSError as error:
        raise DataError(f"the text file {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        return False
    return not empty


def _text_source(root: Path, paths: list[Path], *, held_out: float, seed: int, source: str) -> TextSource:
    names = [path.relative_to(root).as_posix() for path in paths if _is_text(path)]
    if not names:
        raise DataError(f"{root} holds no UTF-8 text files (checked {len(paths)} files)")
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


def text_directory(root: Path, *, held_out: float, seed: int) -> TextSource:
    """Returns a source, to be packed, of all UTF-8 text files below `root`. Hidden files are left out.

    `held_out` is the fraction of the files that go into the part `test`, and `seed` the seed of this division. Raises
    DataError if there are no text files.
    """
    paths = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    return _text_source(root, paths, held_out=held_out, seed=seed, source=f"text:{root.name}")


def python_source(*, held_out: float, seed: int) -> TextSource:
    """Returns a source, to be packed, of the .py files of Python's standard library, without its tests.

    `held_out` is the fraction of the files that go into the part `test`, and `seed` the seed of this division.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
    ]
    version = "Python {}.{}.{}".format(*sys.version_info[:3])
    return _text_source(root, paths, held_out=held_out, seed=seed, source=f"python-source ({version})")
