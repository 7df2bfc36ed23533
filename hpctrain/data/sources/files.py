"""Finds the files of a source, and detects whether they have changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash
from pydantic import JsonValue

from hpctrain.errors import DataError


def identity_of(files: Iterable[Path]) -> JsonValue:
    """Returns a hash of names, sizes and modification times. Raises DataError if a file cannot be accessed."""
    digest = xxhash.xxh3_64()
    try:
        for path in files:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError as error:
        raise DataError(f"a file of the source cannot be read: {error}") from error
    return digest.hexdigest()


def files_below(root: Path, *, suffixes: frozenset[str]) -> list[Path]:
    """Returns the files below `root` with one of these suffixes (in lower case), sorted; leaves out hidden files.

    Raises DataError if there are none.
    """
    if not root.is_dir():
        raise DataError(f"the source {root} {'is not a directory' if root.exists() else 'does not exist'}")
    found = [
        path
        for path in root.rglob("*")
        if path.suffix.lower() in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not found:
        raise DataError(f"the source {root} holds no files named {', '.join(sorted(suffixes))}")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
