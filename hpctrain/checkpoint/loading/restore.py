"""Load the newest checkpoint that is good on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.format.commit_header import UnknownFormatError
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, from_rank_0, say_rejected
from hpctrain.checkpoint.loading.node_sharing import Sharing, nodes_that_share, read_sharing
from hpctrain.comm.collectives.activity import doing
from hpctrain.comm.collectives.agreement import agreed, on_rank_0
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError

T = TypeVar("T")

# Boxes of tensors of which a rank needs only a part: name -> (offset, shape).
Regions = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


class DoesNotFitError(CheckpointError):
    """The checkpoint is good, and not what was asked for: an older one is no better."""


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
    directory: Path | str,
    *,
    comm: Collective,
    regions: Regions | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> Restored | None:
    """Load the newest checkpoint whose every byte that any rank reads is as it was written. Collective.

    A damaged one is named on stderr, and the one before it is tried: all ranks end with the same one.
    regions: tensors of which this rank reads only the box (offset, shape); names not listed are read whole.
    sharing: whether the ranks of a node read a part each and exchange it; node_of_rank: each rank's node, else
    found by the hosts' names. Both the same on every rank.
    Returns None when the directory holds no checkpoint at all. Raises CheckpointError on every rank when it
    holds some but none is good (starting from nothing is then the user's decision, not ours), or when the
    newest is of a format that we do not know.
    """

    def read(checkpoint: Checkpoint) -> Restored:
        tensors = read_together(
            checkpoint, comm=comm, regions=regions, sharing=sharing, node_of_rank=node_of_rank
        )
        return Restored(checkpoint=checkpoint, tensors=tensors, rejected=tuple(rejected))

    rejected: list[Rejected] = []
    return newest_that(read, directory=Path(directory), comm=comm, rejected=rejected)


def newest_that(
    read: Callable[[Checkpoint], T], *, directory: Path, comm: Collective, rejected: list[Rejected]
) -> T | None:
    """What `read` makes of the newest checkpoint for which it raises no CheckpointError. Collective, as `read`
    is, which raises on all ranks or on none.

    rejected: gets the ones that are passed over. None when there is no checkpoint at all; raises when none is good.
    """
    with doing(comm, f"loading the newest checkpoint of {directory}"):
        for path in on_rank_0(comm, lambda: list(map(str, finished_newest_first(directory)))):
            try:
                return read(from_rank_0(comm, partial(read_structure, Path(path))))
            except (UnknownFormatError, DoesNotFitError):
                raise
            except CheckpointError as error:
                rejected.append(Rejected(path=Path(path), reason=str(error)))
                if comm.rank == 0:
                    say_rejected(str(error))
    if rejected:
        reasons = "; ".join(entry.reason for entry in rejected)
        raise CheckpointError(f"no checkpoint in {directory} can be used: {reasons}", agreed=True)
    return None


def load(
    path: Path | str,
    *,
    comm: Collective,
    regions: Regions | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Load one checkpoint, a file or a folder; no falling back. Collective.

    Arguments as of `load_newest_good`. Raises CheckpointError on every rank when any rank finds damage in what it
    reads.
    """
    with doing(comm, f"loading checkpoint {path}"):
        checkpoint = from_rank_0(comm, lambda: read_structure(Path(path)))
        tensors = read_together(
            checkpoint, comm=comm, regions=regions, sharing=sharing, node_of_rank=node_of_rank
        )
        return checkpoint, tensors


def read_together(
    checkpoint: Checkpoint,
    *,
    comm: Collective,
    regions: Regions | None = None,
    names: Sequence[str] | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Every rank reads what it needs: `names`, the same on every rank, or all. Collective.

    Raises CheckpointError on all ranks when any fails.
    """
    with doing(comm, f"loading checkpoint {checkpoint.path}: reading"):
        nodes = nodes_that_share(checkpoint, comm=comm, sharing=sharing, node_of_rank=node_of_rank)
        if nodes is None:
            return agreed(comm, lambda: checkpoint.read_all(regions=regions, names=names))
        wanted = list(checkpoint.tensors) if names is None else names
        return read_sharing(checkpoint, comm=comm, nodes=nodes, names=wanted, regions=regions or {})
