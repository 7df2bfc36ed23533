"""Computes the token windows that do not cross the start of a document, and reads and writes their list (.npy)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.format.manifest import PARTIAL_SUFFIX, Manifest, WindowList
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, replace_file

WINDOWS_NAME = "windows.npy"


def split_windows(
    documents: NDArray[np.int64], *, num_tokens: int, window: int, stride: int
) -> NDArray[np.int64]:
    """Returns the index of the first token of each window that does not cross the start of a document.

    The result is int64, ascending. A window has window + 1 tokens. The first window of a document begins at the
    document's first token, and each further window `stride` tokens later. A document shorter than window + 1 tokens
    has no window. `documents` contains the indices of the first tokens of the documents: int64, shape (n,), ascending.
    The tokens before documents[0] form a document, too.
    """
    borders = np.unique(np.concatenate([[0], documents, [num_tokens]]).astype(np.int64))
    starts, lengths = borders[:-1], np.diff(borders)
    counts = np.where(lengths > window, (lengths - window - 1) // stride + 1, 0)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(starts, counts) + (np.arange(counts.sum()) - before) * stride).astype(np.int64)


def write_windows(starts: NDArray[np.int64], *, directory: Path) -> WindowList:
    """Writes `windows.npy` atomically and durably. Call this before the manifest is written. Raises OSError.

    `starts` contains the index of the first token of each window, within the window's shard.
    """
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(starts, dtype="<i8"), allow_pickle=False)
    content = buffer.getvalue()
    partial = directory / f".{WINDOWS_NAME}{PARTIAL_SUFFIX}"
    replace_file(directory / WINDOWS_NAME, content, partial=partial, durable=True)
    return WindowList(file=WINDOWS_NAME, file_bytes=len(content), hash=hash_of(content))


def read_windows(directory: Path, *, manifest: Manifest) -> NDArray[np.int64] | None:
    """Returns the index of the first token of each window, within the window's shard: int64, shape (samples,).

    Returns None if the manifest lists no windows. The array is a memory map. Raises DataError if the file of windows
    is missing, or if its hash differs from the one in the manifest.
    """
    listed = manifest.windows
    if listed is None:
        return None
    path = directory / listed.file
    try:
        digest = xxhash.xxh3_64()
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        if digest.hexdigest() != listed.hash:
            raise DataError(
                f"the list of windows {path} is not the one of the manifest (its hash differs): "
                "restore both, or index again"
            )
        starts = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"the list of windows {path} is missing: restore it, or index again") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"the list of windows {path} cannot be read: {error}") from error
    if starts.dtype != np.dtype("<i8") or starts.shape != (manifest.samples,):
        raise DataError(
            f"the list of windows {path} is {starts.dtype} {starts.shape}, "
            f"the manifest says int64 {(manifest.samples,)}: restore both, or index again"
        )
    return starts
