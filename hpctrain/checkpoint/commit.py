"""A save is a transaction: the checkpoint is there whole and proven, or it is not there."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.agree_plan import agree_on_plan
from hpctrain.checkpoint.boxes import whole
from hpctrain.checkpoint.engine import Engine, EngineChoice, choose_engine, engine_named
from hpctrain.checkpoint.file_bytes import explained, sync_directory, write_fully
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.hdf5_file import add_metadata
from hpctrain.checkpoint.listing import (
    file_name,
    finished_newest_first,
    partial_name,
    remove_partial_files,
    step_of,
)
from hpctrain.checkpoint.metadata import (
    TENSOR_GROUP,
    Metadata,
    StoredExtent,
    StoredPiece,
    StoredTensor,
    encode_metadata,
)
from hpctrain.checkpoint.names import escape
from hpctrain.checkpoint.plan import WritePlan
from hpctrain.checkpoint.retention import check_keep, steps_to_delete
from hpctrain.checkpoint.seal import encode_seal
from hpctrain.checkpoint.state import State
from hpctrain.checkpoint.structure import make_seal, read_structure
from hpctrain.checkpoint.writing import WriteJob
from hpctrain.comm.agreement import agreed, all_gather_json, on_rank_0
from hpctrain.comm.communicator import Collective
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.version import __version__

MAX_STEP = 10**18 - 1


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """path: of the finished checkpoint. bytes: of the file. seconds: on this rank, all included.
    note: why this engine, and what else is worth knowing."""

    path: Path
    bytes: int
    seconds: float
    engine: Engine
    note: str


def save(
    state: State,
    *,
    directory: Path | str,
    step: int,
    comm: Collective,
    keep: int | None = 3,
    engine: Engine | str = Engine.AUTO,
) -> SaveResult:
    """Write a checkpoint of all ranks' `state` to `directory/step-<step>.h5`. Collective.

    When it returns, the file has been flushed to disk and renamed to its name, its structure has been read
    back, and of the older checkpoints the last `keep` (this one included) are left; None keeps all. A
    checkpoint of the same step is replaced. Partial files that killed saves have left are removed first:
    one run at a time may save to a directory.
    Raises on every rank, with nothing left behind and older checkpoints untouched: CheckpointError when the
    state does not fit together or any rank cannot write; UsageError for a bad argument.
    """
    begin_s = time.perf_counter()
    directory = Path(directory)
    requested = agreed(comm, lambda: _check_arguments(step=step, keep=keep, engine=engine))
    plan = agree_on_plan(state, step=step, comm=comm)
    choice = choose_engine(requested, comm=comm)
    partial = Path(on_rank_0(comm, lambda: _prepare(directory, step=step)))
    final = directory / file_name(step)
    try:
        job = WriteJob(path=partial, plan=plan, sources=state.sources(), comm=comm)
        written = choice.write(job)
        hashes_by_rank = all_gather_json(comm, list(written.hashes))

        def seal_and_rename() -> int:
            metadata = _metadata(
                state,
                step=step,
                plan=plan,
                offsets=written.file_offsets,
                hashes_by_rank=hashes_by_rank,
                choice=choice,
            )
            return _seal_and_rename(metadata, partial=partial, final=final)

        file_bytes = on_rank_0(comm, seal_and_rename)
    except HpctrainError:
        if comm.rank == 0:
            with suppress(OSError):
                partial.unlink()
        raise
    notes = on_rank_0(comm, lambda: _retain(directory, saved=final, keep=keep))
    return SaveResult(
        path=final,
        bytes=file_bytes,
        seconds=time.perf_counter() - begin_s,
        engine=choice.engine,
        note="; ".join([choice.note, *notes]),
    )


def _check_arguments(*, step: int, keep: int | None, engine: Engine | str) -> Engine:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step = {step!r}: a checkpoint's step is a whole number from 0 to {MAX_STEP}")
    check_keep(keep)
    return engine_named(engine)


def _prepare(directory: Path, *, step: int) -> str:
    """Make the directory, remove what killed saves left, and choose the partial file's name. Rank 0."""
    with explained(action="write checkpoints to", path=directory):
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync_directory(directory.parent)
        remove_partial_files(directory)
    return str(directory / partial_name(step, unique=secrets.token_hex(8)))


def _metadata(
    state: State,
    *,
    step: int,
    plan: WritePlan,
    offsets: Sequence[int],
    hashes_by_rank: Sequence[Sequence[str]],
    choice: EngineChoice,
) -> Metadata:
    extents: list[list[StoredExtent]] = [[] for _ in plan.tensors]
    for planned, hashes in zip(plan.extents_by_rank, hashes_by_rank, strict=True):
        for extent, digest in zip(planned, hashes, strict=True):
            extents[extent.tensor].append(StoredExtent(box=extent.box, hash=digest))
    tensors = {
        tensor.name: StoredTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            view=tensor.view,
            pieces=(
                StoredPiece(
                    file=0,
                    dataset=f"/{TENSOR_GROUP}/{escape(tensor.name)}",
                    file_offset=offset,
                    box=whole(tensor.view),
                    extents=tuple(sorted(found, key=lambda extent: extent.box.offset)),
                ),
            ),
        )
        for tensor, offset, found in zip(plan.tensors, offsets, extents, strict=True)
    }
    writer: dict[str, Any] = {
        "hpctrain": __version__,
        "num_ranks": len(plan.extents_by_rank),
        "engine": choice.engine.value,
    }
    return Metadata(
        step=step, created_unix_s=time.time(), writer=writer, document=state.document, tensors=tensors
    )


def _seal_and_rename(metadata: Metadata, *, partial: Path, final: Path) -> int:
    """Rank 0's last act: metadata, seal, fsync, read back, rename, fsync of the directory. Bytes of the file.

    All ranks' content is on disk by now. The rename is the commit: before it nothing has changed for anyone
    who looks for checkpoints.
    """
    data = encode_metadata(metadata, byte_order=sys.byteorder)
    offset = add_metadata(partial, data=data, digest=hash_of(data))
    seal = make_seal(partial, metadata=metadata, data=data, metadata_offset=offset)
    with explained(action="write", path=partial):
        fd = os.open(partial, os.O_WRONLY | os.O_CLOEXEC)
        try:
            # The rest must be on disk before the seal that vouches for it.
            os.fsync(fd)
            write_fully(fd, memoryview(encode_seal(seal)), offset=0)
            os.fsync(fd)
        finally:
            os.close(fd)
    read_structure(partial)
    with explained(action="rename the finished checkpoint to", path=final):
        os.rename(partial, final)
    with explained(action="write to disk that the checkpoint is called", path=final):
        sync_directory(final.parent)
    return seal.file_bytes


def _retain(directory: Path, *, saved: Path, keep: int | None) -> list[str]:
    """Delete older checkpoints, now that the new one is proven and has its final name. What went wrong in
    that is returned as text: it is no reason to call the save failed. Rank 0."""
    try:
        steps = [step_of(path) or 0 for path in finished_newest_first(directory)]
    except HpctrainError as error:
        return [f"older checkpoints were kept: {error}"]
    notes = []
    for step in steps_to_delete(steps, saved=step_of(saved) or 0, keep=keep):
        try:
            (directory / file_name(step)).unlink(missing_ok=True)
        except OSError as error:
            notes.append(f"could not delete {file_name(step)}: {error.strerror}")
    return notes
