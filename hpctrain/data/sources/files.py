"""Files that a source is made of: finding them, and telling whether they have changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash
from pydantic import JsonValue

from hpctrain.errors import DataError


def identity_of(files: Iterable[Path]) -> JsonValue:
    """A hash over names, sizes and times of change: two packings of the same files have the same."""
    digest = xxhash.xxh3_64()
    try:
        for path in files:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError as error:
        raise DataError(f"a file of the source cannot be read: {error}") from error
    return digest.hexdigest()


def files_below(root: Path, *, suffixes: frozenset[str]) -> list[Path]:
    """Files with one of those suffixes (in lower case) below `root`, by name; hidden ones are left out."""
    if not root.is_dir():
        raise DataError(f"the source {root} is {'no directory' if root.exists() else 'not there'}")
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
