"""Windows of a token stream that end at documents: where each begins, kept in an .npy beside the manifest."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.format.manifest import PARTIAL_SUFFIX, Manifest, WindowList
from hpctrain.errors import DataError

WINDOWS_NAME = "windows.npy"


def split_windows(
    documents: NDArray[np.int64], *, num_tokens: int, window: int, stride: int
) -> NDArray[np.int64]:
    """First tokens of all windows of window + 1 tokens, `stride` apart, that cross no start of a document.

    documents: ascending tokens at which documents begin, shape (n,); what is before the first is one too.
    Returns int64, ascending. Documents shorter than window + 1 give none.
    """
    borders = np.unique(np.concatenate([[0], documents, [num_tokens]]).astype(np.int64))
    starts, lengths = borders[:-1], np.diff(borders)
    counts = np.where(lengths > window, (lengths - window - 1) // stride + 1, 0)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(starts, counts) + (np.arange(counts.sum()) - before) * stride).astype(np.int64)


def write_windows(starts: NDArray[np.int64], *, directory: Path) -> WindowList:
    """Write `windows.npy`, durable and atomically, before the manifest that names it. Raises OSError."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(starts, dtype="<i8"), allow_pickle=False)
    content = buffer.getvalue()
    partial = directory / f".{WINDOWS_NAME}{PARTIAL_SUFFIX}"
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / WINDOWS_NAME)
    return WindowList(file=WINDOWS_NAME, file_bytes=len(content), hash=xxhash.xxh3_64_hexdigest(content))


def read_windows(directory: Path, *, manifest: Manifest) -> NDArray[np.int64] | None:
    """First token of each window, counted from the first of its shard: int64 (samples,); None if not listed.

    A memory map. Raises DataError if the list is missing, or not the one that the manifest names.
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
                f"the list of windows {path} is not the one of the manifest: restore both, or index again"
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
