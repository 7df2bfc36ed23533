"""Checks, before a save writes them, that the ranks' copies of replicated tensors have the same bits.

Each rank writes a part of every replicated tensor, so copies that differ would be saved as a mixture of the ranks.
Every rank hashes the same parts of its copies, and combines the hashes into one number. The ranks compare this
number, and exchange the hashes themselves only if it differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.direct_io import Staging
from hpctrain.checkpoint.format.state import Item, Replicated
from hpctrain.checkpoint.format.tensor_difference import Tolerance, amount_of
from hpctrain.checkpoint.planning.rank_extents import Segment, content_of, join_segments, view_of
from hpctrain.checkpoint.planning.write_plan import EXTENT_BYTES
from hpctrain.comm import Collective, ReduceOp, all_gather_json, check_same, describe_ranks, raise_together
from hpctrain.errors import CheckpointError, UsageError

ReplicaCheck: TypeAlias = Literal["sampled", "full", "off"]
OnReplicaMismatch: TypeAlias = Literal["error", "rank0"]

# A sample is 1/SAMPLED_PART of each tensor, at least MIN_PIECE_BYTES of a tensor, and about MAX_SAMPLED_BYTES in all at
# most. Hashing that takes less than one hundredth of the time of writing the state.
SAMPLED_PART = 64
MAX_SAMPLED_BYTES = 64 << 20
MIN_PIECE_BYTES = 4096
# Maximum number of tensors in a sample: a small piece takes about 5 us; saving 10,000 tensors of 4 KiB takes 40 ms.
MAX_SAMPLED_TENSORS = 256
_WHOLE_ELEMENTS = 16  # a multiple of every element size, in bytes
_NAMED = 3
_HASH_MASK = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Replicas:
    """The replicated tensors of a save, and how to sample them when the ranks' copies are compared.

    Attributes:
        sources: Indices of the replicated tensors in `State.sources()`, the list of all tensors that a rank saves.
        num_bytes: Length of each replicated tensor in bytes, by the tensor's index in `State.sources()`.
        turns: A sample contains parts of every `turns`-th tensor, so that `turns` successive samples contain a part
            of each tensor.
        part: A sample contains 1/`part` of the bytes of each tensor in the sample, but at least MIN_PIECE_BYTES per
            tensor.
        numbers: Iterator over the sample numbers, one for each save; see `sample`.
    """

    sources: Sequence[int]
    num_bytes: Mapping[int, int]
    turns: int
    part: int
    numbers: Iterator[int]

    @classmethod
    def of(cls, sources: Sequence[Item], *, step: int) -> Replicas:
        """Returns the replicated tensors among `sources`, the tensors that a rank saves.

        `step` is the step of the first save. The number of the first sample to be compared depends on it, so that a run
        that is often resumed does not compare the same parts each time.
        """
        num_bytes = {
            number: source.tensor.nbytes
            for number, source in enumerate(sources)
            if isinstance(source, Replicated)
        }
        turns = max(1, -(-len(num_bytes) // MAX_SAMPLED_TENSORS))
        return cls(
            sources=list(num_bytes),
            num_bytes=num_bytes, turns=turns,
            part=max(SAMPLED_PART, -(-sum(num_bytes.values()) // (turns * MAX_SAMPLED_BYTES))),
            numbers=itertools.count(xxhash.xxh3_64_intdigest(str(step).encode()) & _HASH_MASK),
        )  # fmt: skip

    def sample(self, number: int) -> list[Segment]:
        """Returns the byte ranges to compare in sample `number`: at most one byte range of each replicated tensor.

        The samples with `turns * part` successive numbers (see the attributes) together contain every byte.
        """
        found = []
        for source in self.sources[number % self.turns :: self.turns]:
            num_bytes = self.num_bytes[source]
            piece = max(MIN_PIECE_BYTES, -(-num_bytes // self.part))
            piece += -piece % _WHOLE_ELEMENTS
            start = number // self.turns % max(1, -(-num_bytes // piece)) * piece
            if num_bytes:
                found.append(Segment(source=source, start=start, num_bytes=min(piece, num_bytes - start)))
        return found

    def whole(self) -> list[Segment]:
        """Returns byte ranges of at most EXTENT_BYTES bytes that make up all replicated tensors."""
        return [
            Segment(source=source, start=start, num_bytes=min(EXTENT_BYTES, num_bytes - start))
            for source, num_bytes in self.num_bytes.items()
            for start in range(0, num_bytes, EXTENT_BYTES)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMismatch:
    """Replicated tensors whose copies differ.

    Attributes:
        ranks_by_name: For the name of each such tensor, the world ranks whose copies differ from rank 0's.
        amounts: For the first few of these tensors, the largest difference between elements of rank 0 and of any rank,
            among the elements that were compared.
        num_ranks: Number of ranks that were compared.
        how: How much was compared, as in `SaveOptions.replica_check`.
    """

    ranks_by_name: dict[str, list[int]]
    amounts: dict[str, float]
    num_ranks: int
    how: ReplicaCheck

    def describe(self) -> str:
        shown = []
        for name, ranks in list(self.ranks_by_name.items())[:_NAMED]:
            text = f"{name!r} on {describe_ranks(ranks)}"
            if self.amounts.get(name):
                text += f" by up to {self.amounts[name]:.3g}"
            shown.append(text)
        more = len(self.ranks_by_name) - len(shown)
        text = ", ".join(shown) + (f", and {more} more tensors" if more else "")
        text = f"replicated tensors differ from rank 0's: {text}"
        if self.num_ranks > 2 and all(len(r) == self.num_ranks - 1 for r in self.ranks_by_name.values()):
            text += ". All other ranks differ from rank 0: its own copy may be the wrong one"
        if self.how == "sampled":
            text += ". A sample was compared: more may differ"
        return text


ON_MISMATCH = (
    "Nothing was saved, and older checkpoints are as they were. Tensors of which each rank has its own, such as "
    "running statistics, belong in FromRank0. Where parameters or optimizer state differ, the ranks no longer train "
    'one model: resume from the last checkpoint, or save rank 0\'s copies with on_replica_mismatch = "rank0". See '
    "docs/runbooks/f11-replicas-differ.md"
)


def compare_replicas(
    replicas: Replicas, sources: Sequence[Item], *, number: int, comm: Collective, how: ReplicaCheck,
    on_mismatch: OnReplicaMismatch,
) -> ReplicaMismatch | None:  # fmt: skip
    """Compares the ranks' copies of replicated tensors. Returns the differences, or None if there are none. Collective.

    The comparison costs one all-reduce of three numbers, unless copies differ. `sources` are the tensors that this rank
    saves. `number` is the number of the sample (the bytes to compare), the same on every rank. `how` states how much is
    compared, and `on_mismatch` what the caller does if copies differ. Raises on every rank: CheckpointError if a rank
    cannot read its copies; UsageError if copies differ and the ranks have different settings.
    """
    segments: list[Segment] = []
    if comm.num_ranks > 1 and how != "off":
        segments = replicas.sample(number) if how == "sampled" else replicas.whole()
    digest, error = 0, None
    hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
    try:
        hashes = _hashes(segments, sources)
        digest = xxhash.xxh3_64_intdigest(how.encode() + hashes.tobytes()) & _HASH_MASK
    except (CheckpointError, RuntimeError) as found:
        error = CheckpointError(str(found))
    votes = torch.tensor([digest, -digest, int(error is not None)], dtype=torch.int64)
    comm.all_reduce(votes, op=ReduceOp.MAX)
    largest, least, failed = votes.tolist()
    if failed:
        raise_together(comm, error)
    if largest == -least:
        return None
    check_same(comm, name="replica_check", value=how, error=UsageError)
    check_same(comm, name="on_replica_mismatch", value=on_mismatch, error=UsageError)
    return _found(segments, sources, hashes=hashes, comm=comm, how=how)


def _hashes(segments: Sequence[Segment], sources: Sequence[Item]) -> NDArray[np.uint64]:
    """Returns the hash of each of `segments`, which are byte ranges of the tensors `sources`.

    The result is uint64, shape (num_segments,).
    """
    own_bytes = join_segments(segments)
    hashes = np.zeros(len(segments), dtype=np.uint64)
    for _ in own_bytes.byte_ranges(
        content_of(sources, own_bytes, groups=own_bytes.groups, staging=Staging()), hashes=hashes
    ):
        pass
    return hashes


def _found(
    segments: Sequence[Segment], sources: Sequence[Item], *, hashes: NDArray[np.uint64], comm: Collective,
    how: ReplicaCheck,
) -> ReplicaMismatch:  # fmt: skip
    """Exchanges the ranks' hashes of `segments` (byte ranges of tensors), and returns which differ. Collective."""
    by_rank = np.stack(
        [np.frombuffer(data, dtype=np.uint64) for data in comm.all_gather_bytes(hashes.tobytes())]
    )  # (num_ranks, num_segments)
    differs = by_rank != by_rank[0]
    ranks_by_name: dict[str, set[int]] = {}
    amounts: dict[str, float] = {}
    for number in np.flatnonzero(differs.any(axis=0)).tolist():
        segment = segments[number]
        name = sources[segment.source].name
        if name not in ranks_by_name and len(ranks_by_name) < _NAMED:
            amounts[name] = _largest_difference(segment, sources, comm=comm)
        ranks = {comm.members[place] for place in np.flatnonzero(differs[:, number]).tolist()}
        ranks_by_name.setdefault(name, set()).update(ranks)
    return ReplicaMismatch(
        ranks_by_name={name: sorted(ranks) for name, ranks in ranks_by_name.items()},
        amounts=amounts, num_ranks=comm.num_ranks, how=how,
    )  # fmt: skip


def _largest_difference(segment: Segment, sources: Sequence[Item], *, comm: Collective) -> float:
    """Returns the largest finite difference between rank 0's values and those of any rank in `segment`. Collective.

    A segment is a byte range of a tensor.
    """
    mine = view_of(sources, segment).cpu().clone()
    reference = mine.clone()
    comm.broadcast(reference, root=0)
    dtype = sources[segment.source].tensor.dtype
    amount = amount_of(reference.view(dtype), mine.view(dtype), tolerance=Tolerance())
    return float(max(all_gather_json(comm, amount.max_abs)))
