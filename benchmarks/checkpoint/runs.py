"""The measurements of each figure, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.figures import (
    load_records,
    load_with_peers_record,
    memory_record,
    other_records,
    replica_record,
    save_records,
    small_records,
    stall_record,
    steps_records,
)  # fmt: skip
from benchmarks.checkpoint.launch import measured
from benchmarks.results_file import Record

SEED = 20
NUM_TENSORS = 32
SMALL_TENSORS, SMALL_BYTES = 10_000, 4096
ALL_PEERS = ("dcp", "dcp, no fsync", "torch.save", "safetensors", "h5py mpio")
FEW_PEERS = ("dcp", "dcp, no fsync")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. rounds: of figures whose bar is set by an issue, at least 7. few_rounds: of others."""

    num_bytes: int = 512 << 20
    large_bytes: int = 2 << 30
    small_tensors: int = SMALL_TENSORS
    rounds: int = 9
    # Of short measurements that vary more from round to round than they differ from their bar.
    small_rounds: int = 21
    cold_rounds: int = 21
    few_rounds: int = 3
    steps_rounds: int = 5
    replica_rounds: int = 41  # many, since the difference is smaller than that between rounds
    limit_mb_per_s: float = 50.0


FULL = Scale()
QUICK = replace(
    FULL,
    num_bytes=16 << 20,
    large_bytes=32 << 20,
    small_tensors=200,
    rounds=2,
    small_rounds=2,
    cold_rounds=2,
    few_rounds=1,
    steps_rounds=1,
    replica_rounds=2,
    limit_mb_per_s=20.0,
)

Say = Callable[[str], None]


def saves(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 1: saving."""
    asked = _asked(scale)
    few = {**asked, "peers": FEW_PEERS, "engines": ["auto"], "repeats": scale.few_rounds}
    main = main_saves(scratch, scale, say, peers=ALL_PEERS, engines=("auto", "direct", "mpio"))
    total = scale.small_tensors * SMALL_BYTES
    settings: dict[str, Any] = {
        **asked, "num_bytes": total, "tensors": {"many": scale.small_tensors, "few": NUM_TENSORS},
    }  # fmt: skip
    # hpctrain's saves first without a peer: the state in which a peer leaves the machine's memory slows the next save
    # by more than the difference measured here.
    small = measured(
        "small_saves", {**settings, "peers": (), "repeats": scale.small_rounds}, num_ranks=2, scratch=scratch
    )
    small_with_peer = measured(
        "small_saves", {**settings, "peers": ["dcp"], "repeats": scale.rounds}, num_ranks=2, scratch=scratch
    )
    say("saving many small tensors")
    others = {
        "1-rank": measured("saves", few, num_ranks=1, scratch=scratch),
        "4-ranks": measured("saves", few, num_ranks=4, scratch=scratch),
        "2gib": measured("saves", {**few, "num_bytes": scale.large_bytes}, num_ranks=2, scratch=scratch),
    }
    say("saving, other sizes and numbers of ranks")
    what = f"{scale.small_tensors:,} tensors of 4 KiB, 2 ranks"
    return [*main, *small_records(small, small_with_peer, what=what), *other_records(others)]


def main_saves(
    scratch: Path, scale: Scale, say: Say, *, peers: Sequence[str], engines: Sequence[str]
) -> list[Record]:
    """Measures what figure 1 has of 2 ranks with the state's full size."""
    main = measured(
        "saves", {**_asked(scale), "peers": peers, "engines": engines, "repeats": scale.rounds},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("saving, 2 ranks")
    return save_records(main)


def loads(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 2: loading."""
    asked = _loads_asked(scale)
    # hpctrain and raw reading without peers in the process: after a peer, whether huge pages are available depends on
    # the state in which it left the memory.
    warm = measured(
        "loads", {**asked, "cold": False, "peers": (), "repeats": scale.rounds, "warmup": 1},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, warm")
    with_peers = loads_with_peers(
        scratch, scale, say, peers=("dcp", "torch.save", "safetensors", "h5py mpio")
    )
    cold = measured(
        "loads", {**asked, "cold": True, "peers": (), "repeats": scale.cold_rounds, "warmup": 0},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, cold")
    return [*load_records(warm, cold), with_peers]


def loads_with_peers(scratch: Path, scale: Scale, say: Say, *, peers: Sequence[str]) -> Record:
    """Measures loads that alternate with those of peers, in the page cache."""
    found = measured(
        "loads",
        {**_loads_asked(scale), "cold": False, "peers": peers, "repeats": scale.rounds, "warmup": 1},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, alternating with peers")
    return load_with_peers_record(found)


def stalls(scratch: Path, scale: Scale, say: Say) -> Record:
    """Measures the time in which training is blocked by a save in the background."""
    found = measured("stalls", {**_asked(scale), "repeats": scale.small_rounds}, num_ranks=2, scratch=scratch)
    say("time in which training is blocked")
    return stall_record(found)


def background(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 3: saving in the background."""
    asked = _asked(scale)
    stall = stalls(scratch, scale, say)
    memory = {
        what: measured("memory", {**asked, "what": what, "saves": 3}, num_ranks=2, scratch=scratch)["ranks"]
        for what in ("ours", "dcp")
    }
    say("memory")
    limits = {"free": None, "limited": scale.limit_mb_per_s, "dcp async": None}
    steps = measured(
        "steps", {**asked, "limits": limits, "repeats": scale.steps_rounds}, num_ranks=2, scratch=scratch
    )  # fmt: skip
    say("training steps during the writing")
    return [
        stall, memory_record(memory), *steps_records(steps, limit_mb_per_s=scale.limit_mb_per_s)
    ]  # fmt: skip


def replicas(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 4: comparing replicas."""
    found = measured(
        "replica_saves", {**_asked(scale), "repeats": scale.replica_rounds}, num_ranks=2, scratch=scratch
    )
    say("comparing replicas")
    return [replica_record(found)]


def _asked(scale: Scale) -> dict[str, Any]:
    return {"num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "warmup": 1, "seed": SEED}


def _loads_asked(scale: Scale) -> dict[str, Any]:
    return {
        "num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "seed": SEED,
        "touched_bytes": 6 * scale.num_bytes,
    }  # fmt: skip
