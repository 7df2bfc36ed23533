"""Loads all tensors, or some, from a given checkpoint or from the newest undamaged checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.format.dtypes import dtype_name
from hpctrain.checkpoint.format.metadata import StoredTensor, UnknownFormatError
from hpctrain.checkpoint.format.state import SEPARATOR
from hpctrain.checkpoint.format.typed_values import TEXT, model_state
from hpctrain.checkpoint.loading.check_structure import is_checkpoint, read_structure
from hpctrain.checkpoint.loading.checkpoint import (
    Checkpoint,
    Regions,
    Sharing,
    from_rank_0,
    nodes_that_share,
    read_sharing,
    say_rejected,
)
from hpctrain.comm import Collective, agreed, doing, on_rank_0
from hpctrain.distributed import pipeline_of, shard_like
from hpctrain.errors import CheckpointError

# Loads one checkpoint, or the newest one that no rank finds damaged.


T = TypeVar("T")

# Regions that depend on what the checkpoint holds, such as the number of ranks that saved it. Must not fail.
RegionsOf = Callable[[Checkpoint], Regions]


class DoesNotFitError(CheckpointError):
    """Raised if a checkpoint is undamaged, but does not have the requested tensors. No older checkpoint is tried."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A checkpoint that was skipped because it is damaged.

    Attributes:
        path: The checkpoint.
        reason: The error that was found.
    """

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """The checkpoint that `load_newest_good` loaded, and its tensors.

    Attributes:
        checkpoint: The loaded checkpoint, with its step and document.
        tensors: The tensors by name, on the CPU, verified.
        rejected: Newer checkpoints that were skipped as damaged, newest first.
    """

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    rejected: tuple[Rejected, ...]


def load_newest_good(
    directory: Path | str,
    *,
    comm: Collective,
    regions: Regions | RegionsOf | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> Restored | None:
    """Loads the newest checkpoint in which no rank finds damage in the bytes that it reads. Collective.

    A damaged checkpoint is reported on stderr, and the next older checkpoint is tried; all ranks load the same
    checkpoint.

    Args:
        directory: Directory of the checkpoints.
        comm: The ranks that load together.
        regions: For tensors that this rank needs only in part. Maps a tensor's name to a box (offset, shape), or to
            a list of boxes, whose elements are concatenated along the first dimension. A function that takes the
            checkpoint and returns such a mapping is also accepted. All other tensors are read whole.
        sharing: Whether the ranks of a node each read a part and exchange the parts: "node" (they do), "none"
            (every rank reads all that it needs) or "auto" (the size and the filesystem of the checkpoint decide).
            The same on every rank.
        node_of_rank: Node of each rank; the same list on every rank. None: ranks with the same host name share a
            node.

    Returns:
        The checkpoint and its tensors; None if the directory holds no checkpoint.

    Raises:
        CheckpointError: On every rank, if the directory holds checkpoints but all are damaged (whether to start
            from scratch is then the user's decision), or if one has an unknown format version.
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
    """Calls `read` with the newest checkpoint, then with older checkpoints until `read` succeeds. Collective.

    Returns the result of the successful call of `read`; None if there is no checkpoint. `read` is collective and must
    raise on all ranks or on none. The checkpoints for which `read` has raised an error are appended to `rejected`.
    Raises CheckpointError on every rank if there are checkpoints but `read` raises for each of them; UnknownFormatError
    and DoesNotFitError are raised at once.
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
    regions: Regions | RegionsOf | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Loads one given checkpoint. If this checkpoint is damaged, no other checkpoint is tried. Collective.

    Args:
        path: The checkpoint, a file or a folder.
        comm: The ranks that load together.
        regions: Tensors that this rank needs only in part, as in `load_newest_good`.
        sharing: Whether the ranks of a node share the reading, as in `load_newest_good`.
        node_of_rank: Node of each rank, as in `load_newest_good`.

    Returns:
        The checkpoint, and its tensors by name, on the CPU.

    Raises:
        CheckpointError: On every rank, if any rank finds damage in the bytes that it reads.
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
    regions: Regions | RegionsOf | None = None,
    names: Sequence[str] | None = None,
    sharing: Sharing | str = Sharing.AUTO,
    node_of_rank: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint, or those in `names`, and returns them by name, on the CPU. Collective.

    `names` must be the same on every rank; the other arguments are as in `load_newest_good`. Raises CheckpointError
    on all ranks if any rank fails.
    """
    with doing(comm, f"loading checkpoint {checkpoint.path}: reading"):
        boxes = (regions(checkpoint) if callable(regions) else regions) or {}
        nodes = nodes_that_share(checkpoint, comm=comm, sharing=sharing, node_of_rank=node_of_rank)
        if nodes is None:
            return agreed(comm, lambda: checkpoint.read_all(regions=boxes, names=names))
        wanted = list(checkpoint.tensors) if names is None else names
        return read_sharing(checkpoint, comm=comm, nodes=nodes, names=wanted, regions=boxes)


# Loads some tensors of a checkpoint, possibly under other names, and reports tensors that do not match.


MODEL_PREFIX = "model/"
# Maps a name in the checkpoint, without the prefix, to the name in this program; a function returns None to skip it.
Rename = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A tensor whose dtype or shape in the checkpoint differs from the expected one.

    Attributes:
        name: Name of the tensor in this program.
        there: Dtype and shape in the checkpoint, such as `float32 [3, 4]`.
        here: Dtype and shape expected by this program.
    """

    name: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.name} is {self.there} in the checkpoint, {self.here} in this program"


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialLoad:
    """What `load_partial` loaded, and what did not match.

    Attributes:
        checkpoint: The checkpoint that was used.
        tensors: Tensors that this rank has read, by their names in this program, on the CPU, verified.
        num_loaded: Number of tensors that the ranks together have loaded.
        missing: Requested names that the checkpoint does not have.
        unexpected: Names, as in the checkpoint, of tensors with the prefix that were not requested.
        mismatched: Tensors with another dtype or shape than expected; they are not loaded.
    """

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    num_loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        """Returns a one-line summary: the number of loaded tensors, and what did not match."""
        return f"{self.num_loaded} tensors of {self.checkpoint.path}" + _differences(
            self.missing, self.unexpected, self.mismatched
        )


def load_partial(
    path: Path | str,
    *,
    comm: Collective,
    prefix: str = "",
    names: Iterable[str] | None = None,
    rename: Rename | None = None,
    expected: Mapping[str, torch.Tensor] | None = None,
    values: Collection[str] = (),
    reads: Container[str] | None = None,
    strict: bool = True,
) -> PartialLoad:
    """Loads some of a checkpoint's tensors, and reads no others. Collective.

    All arguments but `reads` must be the same on all ranks.

    Args:
        path: A checkpoint, or a directory of checkpoints; of a directory, the newest checkpoint whose requested
            tensors are undamaged is used.
        comm: The ranks that load together.
        prefix: Load only tensors whose names begin with this text, and remove the text from the names.
        names: Requested names, as in this program; None: all, or the names in `expected`.
        rename: Maps a name in the checkpoint, without the prefix, to the name in this program: a mapping, or a
            function. A name that the mapping does not contain stays as it is. The function returns None for a
            tensor to skip.
        expected: Tensors of this program, by name, whose dtypes and shapes the loaded tensors must have. Tensors on the
            meta device are accepted.
        values: Names, in this program, of state-dict entries that are not tensors. The checkpoint stores each such
            entry as one or more tensors (see `model_items`).
        reads: Names, in this program, of the tensors whose content this rank needs; None: all.
        strict: Raise CheckpointError for missing, unexpected and mismatched tensors, instead of reporting them in
            the result.

    Returns:
        The tensors, and what did not match.

    Raises:
        CheckpointError: On every rank, if there is no checkpoint, if a requested tensor is damaged, if two tensors
            would get the same name, and with `strict` if tensors do not match.
    """
    wanted = None if names is None else set(names)
    if wanted is None and expected is not None:
        wanted = set(expected)

    def read(checkpoint: Checkpoint) -> PartialLoad:
        return _read_part(
            checkpoint, comm=comm, prefix=prefix, wanted=wanted, rename=rename, expected=expected or {},
            values=values, reads=reads, strict=strict,
        )  # fmt: skip

    path = Path(path)
    if on_rank_0(comm, lambda: is_checkpoint(path) or not path.is_dir()):
        with doing(comm, f"loading a part of checkpoint {path}"):
            return read(from_rank_0(comm, lambda: read_structure(path)))
    found = newest_that(read, directory=path, comm=comm, rejected=[])
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}", agreed=True)
    return found


def _read_part(
    checkpoint: Checkpoint, *, comm: Collective, prefix: str, wanted: set[str] | None, rename: Rename | None,
    expected: Mapping[str, torch.Tensor], values: Collection[str], reads: Container[str] | None, strict: bool,
) -> PartialLoad:  # fmt: skip
    selected = _select(checkpoint, prefix=prefix, rename=rename)
    parts = {name for name in selected if name.partition(SEPARATOR)[0] in values}
    wanted = None if wanted is None else wanted | parts
    lacking = set(values) - {name.partition(SEPARATOR)[0] for name in parts}
    missing = sorted(((wanted or set()) - selected.keys()) | lacking)
    unexpected = [t.name for name, t in selected.items() if wanted is not None and name not in wanted]
    chosen = {name: t for name, t in selected.items() if wanted is None or name in wanted}
    mismatched = [
        Mismatch(name=name, there=_stored_kind(stored), here=_kind(expected[name]))
        for name, stored in chosen.items()
        if name in expected and _stored_kind(stored) != _kind(expected[name])
    ]
    if strict and (missing or unexpected or mismatched):
        raise DoesNotFitError(
            f"{checkpoint.path} does not fit{_differences(missing, unexpected, mismatched)}. Rename the "
            "tensors, or load without `strict` to skip those that do not fit",
            agreed=True,
        )
    for mismatch in mismatched:
        del chosen[mismatch.name]
    mine = [name for name in chosen if reads is None or name in reads or name in parts]
    # An empty box of the other tensors: all ranks must read tensors of the same names.
    regions: Regions = {
        stored.name: ((0,) * len(stored.shape), (0,) * len(stored.shape))
        for name, stored in chosen.items()
        if reads is not None and name not in mine and stored.shape
    }
    names = [stored.name for stored in chosen.values()]
    content = read_together(checkpoint, comm=comm, names=names, regions=regions)
    return PartialLoad(
        checkpoint=checkpoint,
        tensors={name: content[chosen[name].name] for name in mine},
        num_loaded=len(chosen),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
    )


def load_weights(
    model: torch.nn.Module,
    path: Path | str,
    *,
    comm: Collective,
    prefix: str = MODEL_PREFIX,
    rename: Rename | None = None,
    strict: bool = True,
) -> PartialLoad:
    """Loads a checkpoint's parameters and buffers into `model`, and nothing else. Collective.

    In a pipeline each rank reads only the tensors of its stages, but a mismatch in any stage is raised or reported
    on every rank.

    Args:
        model: The model, which is unchanged if this raises. Its parameters may be DTensors.
        path: A checkpoint, or a directory of checkpoints, as in `load_partial`.
        comm: The ranks that load together.
        prefix: Prefix of the model's tensors in the checkpoint.
        rename: Maps names in the checkpoint to names in the model, as in `load_partial`.
        strict: Raise CheckpointError if the tensors do not match the model exactly; otherwise parameters that the
            checkpoint does not have keep their values.

    Returns:
        The loaded tensors, and what did not match.

    Raises:
        CheckpointError: On every rank, as in `load_partial`.
    """
    present = model.state_dict()
    own = {name: value for name, value in present.items() if isinstance(value, torch.Tensor)}
    values = present.keys() - own.keys()
    pipeline = pipeline_of(model)
    loaded = load_partial(
        path, comm=comm, prefix=prefix, rename=rename, expected=own if pipeline is None else pipeline.state,
        values=values, reads=own, strict=strict,
    )  # fmt: skip
    state = model_state(loaded.tensors, present=present)
    here = {name: shard_like(value, own[name]) if name in own else value for name, value in state.items()}
    model.load_state_dict(here, strict=False)
    return loaded


def _select(checkpoint: Checkpoint, *, prefix: str, rename: Rename | None) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint whose names begin with `prefix`, by their names in this program.

    The name in this program is the name without the prefix, as `rename` maps it. Raises DoesNotFitError if two tensors
    would have the same name.
    """
    selected: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        if not name.startswith(prefix):
            continue
        there = name[len(prefix) :]
        own, *part = there.split(SEPARATOR, 1)
        if f"{prefix}{own}{TEXT}" not in checkpoint.tensors:
            own, part = there, []
        here: str | None = own
        if callable(rename):
            here = rename(own)
        elif rename is not None:
            here = rename.get(own, own)
        if here is None:
            continue
        here = SEPARATOR.join([here, *part])
        if here in selected:
            raise DoesNotFitError(
                f"{checkpoint.path}: both {selected[here].name!r} and {name!r} would be called {here!r}",
                agreed=True,
            )
        selected[here] = stored
    return selected


def _differences(missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[Mismatch]) -> str:
    lines = [
        (list(missing), "missing in the checkpoint"),
        (list(unexpected), "not wanted by this program"),
        (list(map(str, mismatched)), "of another kind"),
    ]
    parts = [f"; {len(found)} {what}: {_some(found)}" for found, what in lines if found]
    return "".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


def _kind(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _stored_kind(stored: StoredTensor) -> str:
    return f"{stored.dtype} {list(stored.shape)}"
