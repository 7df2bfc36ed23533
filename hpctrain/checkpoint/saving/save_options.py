"""What a save is asked for, and who writes to which file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpctrain.checkpoint.engines.engine_name import Engine, engine_named
from hpctrain.checkpoint.files.filesystem_type import Filesystem
from hpctrain.checkpoint.planning.replicas import OnReplicaMismatch, ReplicaCheck
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.errors import UsageError

MAX_STEP = 10**18 - 1
PageCache: TypeAlias = Literal["auto", "use", "bypass"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """keep: what is deleted once the new one is proven; a number means the last so many, None all.
    files: 1 is one file; a number K a folder of K files, neighbouring ranks sharing one; "node" one file a node.
    node_of_rank: each rank's node, numbered from 0 in the order of their first ranks; for "node".
    local: every node has a `directory` of its own, in which its file is kept; needs "node".
    limit_mb_per_s: a rank writes no faster, in 10^6 bytes a second.
    page_cache: whether the engine `direct` writes through it; "auto" bypasses it where that is known to be faster,
    unless the files are `local`: those are read again at once.
    recycle: of the checkpoints that `keep` lets go of, one's room on disk is kept for the next save, where that is
    known to be faster (ext4): in a hidden file, which `recycling.remove_spares` gives back. Not of folders.
    replica_check: whether the ranks' copies of what is `Replicated` are compared. "sampled": one part in 64 of each
    tensor, 64 MiB in all at most, another part in each save; "full": every byte, which every rank hashes.
    on_replica_mismatch: where copies differ, "error" on every rank, with nothing saved; "rank0": rank 0's copies of all
    replicated tensors are saved, with a warning.
    """

    keep: Retention | int | None = 3
    engine: Engine | str = Engine.AUTO
    files: int | Literal["node"] = 1
    node_of_rank: Sequence[int] | None = None
    local: bool = False
    limit_mb_per_s: float | None = None
    page_cache: PageCache = "auto"
    recycle: bool = False
    replica_check: ReplicaCheck = "sampled"
    on_replica_mismatch: OnReplicaMismatch = "error"

    def recycles(self, filesystem: Filesystem) -> bool:
        """Whether a save takes the room of a checkpoint that was let go of, and keeps it for the next."""
        return self.recycle and self.files == 1 and filesystem.keeps_blocks

    def bypass_cache(self, filesystem: Filesystem) -> bool:
        """Whether large writes go past the page cache."""
        if self.page_cache == "auto":
            return filesystem.is_written_past_cache and not self.local
        return self.page_cache == "bypass"


def check_options(options: SaveOptions, *, step: int, num_ranks: int) -> Engine:
    """The engine that is asked for. Raises UsageError for a bad argument."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step = {step!r}: a checkpoint's step is a whole number from 0 to {MAX_STEP}")
    retention_of(options.keep)
    if options.files != "node" and (
        isinstance(options.files, bool) or not isinstance(options.files, int) or options.files < 1
    ):
        raise UsageError(f'files = {options.files!r}: a whole number from 1 on, or "node"')
    if options.files == "node" and len(options.node_of_rank or ()) != num_ranks:
        raise UsageError(
            f'files = "node" needs the node of each of the {num_ranks} ranks, node_of_rank names '
            f"{len(options.node_of_rank or ())}"
        )
    if options.local and options.files != "node":
        raise UsageError('a checkpoint on the nodes\' own storage is one file a node: files = "node"')
    for name, value, choices in (
        ("page_cache", options.page_cache, get_args(PageCache)),
        ("replica_check", options.replica_check, get_args(ReplicaCheck)),
        ("on_replica_mismatch", options.on_replica_mismatch, get_args(OnReplicaMismatch)),
    ):
        if value not in choices:
            raise UsageError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
    if options.limit_mb_per_s is not None and not options.limit_mb_per_s > 0:
        raise UsageError(f"limit_mb_per_s = {options.limit_mb_per_s}: a rate above 0")
    engine = engine_named(options.engine)
    if engine is Engine.MPIO and options.page_cache == "bypass":
        raise UsageError(
            'page_cache = "bypass" belongs to the engine direct: MPI has its own way to the file'
        )
    return engine


def file_of_rank(options: SaveOptions, *, num_ranks: int) -> tuple[int, ...]:
    """The file that each rank writes to: neighbouring ranks share one. No more files than ranks."""
    if options.files == "node":
        assert options.node_of_rank is not None
        number: dict[int, int] = {}
        return tuple(number.setdefault(node, len(number)) for node in options.node_of_rank)
    files = min(options.files, num_ranks)
    return tuple(rank * files // num_ranks for rank in range(num_ranks))


def retention_of(keep: Retention | int | None) -> Retention:
    """Raises UsageError unless `keep` is None (all), at least 1, or a retention."""
    return keep if isinstance(keep, Retention) else Retention(last=keep)
