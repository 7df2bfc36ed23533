"""Options of a save, and which rank writes to which file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpctrain.checkpoint.engines.engine_name import Engine, engine_named
from hpctrain.checkpoint.planning.replicas import OnReplicaMismatch, ReplicaCheck
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.errors import UsageError
from hpctrain.storage import Filesystem

MAX_STEP = 10**18 - 1
PageCache: TypeAlias = Literal["auto", "use", "bypass"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of a save. They must be the same on every rank.

    Attributes:
        keep: Which checkpoints to keep after the commit: a `Retention`, the number of newest checkpoints to keep, or
            None for all.
        engine: How the bytes are written: "auto", "direct" or "mpio" (see `Engine`).
        files: Number of files. 1: one file. K > 1: a folder of K files, each written by a group of consecutive
            ranks. "node": a folder with one file per node.
        node_of_rank: For each rank, the index of its node. Nodes are numbered from 0 in the order of their lowest
            ranks. Needed for `files="node"`.
        local: True if `directory` is on node storage, so that each node keeps its own file only; needs
            `files="node"`.
        limit_mb_per_s: Maximum write rate per rank, in 10^6 bytes/s; None: no limit.
        page_cache: Whether the engine `direct` writes through the page cache: "use", "bypass" or "auto". "auto"
            bypasses the page cache on filesystems where this is known to be faster, except for `local` files, which are
            soon read again.
        replica_check: How much of the ranks' copies of `Replicated` tensors a save compares. "sampled": 1/64 of
            each tensor, at most 64 MiB in total, a different part in each save. "full": every byte, hashed by every
            rank. "off": nothing.
        on_replica_mismatch: What to do if the copies differ. "error": raise CheckpointError on every rank and save
            nothing. "rank0": save rank 0's copies of all replicated tensors, with a warning.
    """

    keep: Retention | int | None = 3
    engine: Engine | str = Engine.AUTO
    files: int | Literal["node"] = 1
    node_of_rank: Sequence[int] | None = None
    local: bool = False
    limit_mb_per_s: float | None = None
    page_cache: PageCache = "auto"
    replica_check: ReplicaCheck = "sampled"
    on_replica_mismatch: OnReplicaMismatch = "error"

    def bypass_cache(self, filesystem: Filesystem) -> bool:
        """Returns True if large writes to this filesystem bypass the page cache.

        Args:
            filesystem: Filesystem of the directory, as `hpctrain.storage.filesystem_of` returns it.
        """
        if self.page_cache == "auto":
            return filesystem.is_written_past_cache and not self.local
        return self.page_cache == "bypass"


def check_save_options(options: SaveOptions, *, step: int, num_ranks: int) -> Engine:
    """Checks the options of a save and returns the requested engine. Raises UsageError for an invalid value."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step = {step!r}: a checkpoint's step is an integer from 0 to {MAX_STEP}")
    retention_of(options.keep)
    if options.files != "node" and (
        isinstance(options.files, bool) or not isinstance(options.files, int) or options.files < 1
    ):
        raise UsageError(f'files = {options.files!r}: give an integer of at least 1, or "node"')
    if options.files == "node" and len(options.node_of_rank or ()) != num_ranks:
        raise UsageError(
            f'files = "node" needs the node of each of the {num_ranks} ranks, node_of_rank lists '
            f"{len(options.node_of_rank or ())}"
        )
    if options.local and options.files != "node":
        raise UsageError('local checkpoints have one file per node: set files = "node"')
    for name, value, choices in (
        ("page_cache", options.page_cache, get_args(PageCache)),
        ("replica_check", options.replica_check, get_args(ReplicaCheck)),
        ("on_replica_mismatch", options.on_replica_mismatch, get_args(OnReplicaMismatch)),
    ):
        if value not in choices:
            raise UsageError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
    if options.limit_mb_per_s is not None and not options.limit_mb_per_s > 0:
        raise UsageError(f"limit_mb_per_s = {options.limit_mb_per_s}: give a rate above 0")
    engine = engine_named(options.engine)
    if engine is Engine.MPIO and options.page_cache == "bypass":
        raise UsageError(
            'page_cache = "bypass" does not apply to engine = "mpio", which writes through MPI-IO: drop one of the two'
        )
    return engine


def file_of_rank(options: SaveOptions, *, num_ranks: int) -> tuple[int, ...]:
    """Returns, for each rank, the index of the file that it writes to. There are at most as many files as ranks."""
    if options.files == "node":
        assert options.node_of_rank is not None
        number: dict[int, int] = {}
        return tuple(number.setdefault(node, len(number)) for node in options.node_of_rank)
    files = min(options.files, num_ranks)
    return tuple(rank * files // num_ranks for rank in range(num_ranks))


def retention_of(keep: Retention | int | None) -> Retention:
    """Returns `keep` as a `Retention`. Raises UsageError if `keep` is a number below 1."""
    return keep if isinstance(keep, Retention) else Retention(last=keep)
