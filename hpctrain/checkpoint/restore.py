"""Load the newest checkpoint that is good on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.listing import finished_newest_first
from hpctrain.checkpoint.read import Checkpoint, from_message, say_rejected, to_message
from hpctrain.checkpoint.seal import UnknownFormatError
from hpctrain.comm.agreement import on_rank_0, raise_together
from hpctrain.comm.communicator import Collective
from hpctrain.errors import CheckpointError

# Boxes of tensors of which a rank needs only a part: name -> (offset, shape).
Regions = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """tensors: by name, on the CPU, verified. rejected: newer ones that were passed over, newest first."""

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    rejected: tuple[Rejected, ...]


def load_newest_good(
    directory: Path | str, *, comm: Collective, regions: Regions | None = None
) -> Restored | None:
    """Load the newest checkpoint whose every byte that any rank reads is as it was written. Collective.

    A damaged one is named on stderr, and the one before it is tried: all ranks end with the same one.
    regions: tensors of which this rank reads only the box (offset, shape); names not listed are read whole.
    Returns None when the directory holds no checkpoint at all. Raises CheckpointError on every rank when it
    holds some but none is good (starting from nothing is then the user's decision, not ours), or when the
    newest is of a format that we do not know.
    """
    candidates = on_rank_0(comm, lambda: [str(path) for path in finished_newest_first(Path(directory))])
    rejected: list[Rejected] = []
    for path in candidates:
        message = on_rank_0(comm, partial(_examine, Path(path)))
        if "unknown_format" in message:
            raise CheckpointError(message["unknown_format"], agreed=True)
        try:
            if "damaged" in message:
                raise CheckpointError(message["damaged"])
            checkpoint = from_message(message)
            tensors = _read_together(checkpoint, comm=comm, regions=regions)
        except CheckpointError as error:
            rejected.append(Rejected(path=Path(path), reason=str(error)))
            if comm.rank == 0:
                say_rejected(str(error))
            continue
        return Restored(checkpoint=checkpoint, tensors=tensors, rejected=tuple(rejected))
    if rejected:
        reasons = "; ".join(entry.reason for entry in rejected)
        raise CheckpointError(f"no checkpoint in {directory} can be used: {reasons}", agreed=True)
    return None


def load(
    path: Path | str, *, comm: Collective, regions: Regions | None = None
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Load one checkpoint, a file or a folder; no falling back. Collective.

    Raises CheckpointError on every rank when any rank finds damage in what it reads.
    """
    checkpoint = from_message(on_rank_0(comm, lambda: to_message(Path(path))))
    return checkpoint, _read_together(checkpoint, comm=comm, regions=regions)


def _read_together(
    checkpoint: Checkpoint, *, comm: Collective, regions: Regions | None
) -> dict[str, torch.Tensor]:
    """Every rank reads what it needs. Raises CheckpointError on all ranks when any fails. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    error: CheckpointError | None = None
    try:
        tensors = checkpoint.read_all(regions=regions)
    except CheckpointError as caught:
        error = caught
    raise_together(comm, error)
    return tensors


def _examine(path: Path) -> dict[str, Any]:
    """What rank 0 finds, as a message: an error's class would not survive the way to the other ranks."""
    try:
        return to_message(path)
    except UnknownFormatError as error:
        return {"unknown_format": str(error)}
    except CheckpointError as error:
        return {"damaged": str(error)}
