"""From the name of a source to finished dataset directories: what `hpctrain data pack` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpctrain.data.manifest import Manifest
from hpctrain.data.pack import SHARD_BYTES, Existing, Progress, pack_arrays, pack_tokens, prepare_directory
from hpctrain.data.sources import ArraySource, TextSource, open_source, read_tokens
from hpctrain.errors import UsageError

DEFAULT_WINDOW = 128


def pack_source(
    source: str,
    *,
    out: Path,
    window: int | None = None,
    stride: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    held_out: float | None = None,
    seed: int = 0,
    existing: Existing = Existing.REFUSE,
    progress: Callable[[Path], Progress] | None = None,
) -> dict[Path, Manifest]:
    """Pack a source (see `open_source`) into `out`/train and `out`/test, or `out` if nothing is held out.

    window, stride: of token streams (128 and the window unless given); refused for arrays.
    progress: makes the progress callback of each dataset directory.
    Returns dataset directory -> manifest. Raises UsageError, DataError.
    """
    opened = open_source(source, held_out=held_out, seed=seed)
    if isinstance(opened, ArraySource) and (window is not None or stride is not None):
        raise UsageError(f"--window and --stride cut a stream of tokens; the source {source} holds arrays")
    directories = {part: out if part == "all" else out / part for part in opened.parts}
    _prepare(out, directories=list(directories.values()), existing=existing)
    manifests = {}
    for part, directory in directories.items():
        tell = progress(directory) if progress is not None else None
        if isinstance(opened, TextSource):
            manifests[directory] = pack_tokens(
                directory,
                read_tokens(opened.parts[part]),
                window=window if window is not None else DEFAULT_WINDOW,
                stride=stride,
                shard_bytes=shard_bytes,
                attributes={**opened.attributes, "part": part, "files": len(opened.parts[part])},
                progress=tell,
            )
        else:
            manifests[directory] = pack_arrays(
                directory,
                opened.parts[part],
                shard_bytes=shard_bytes,
                attributes={**opened.attributes, "part": part},
                progress=tell,
            )
    return manifests


def _prepare(out: Path, *, directories: list[Path], existing: Existing) -> None:
    """Every directory is looked at before the first is written: nothing is replaced by half."""
    if out not in directories and out.is_dir():
        foreign = sorted(child.name for child in out.iterdir() if child not in directories)
        if foreign:
            raise UsageError(
                f"{out} is not empty ({', '.join(foreign[:5])}): choose another directory for the datasets "
                f"{', '.join(directory.name for directory in directories)}"
            )
    for directory in directories:
        prepare_directory(directory, existing=existing)
