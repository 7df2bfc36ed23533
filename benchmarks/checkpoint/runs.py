"""What is run for each figure, at which scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.figures import (
    beside_records,
    load_records,
    memory_record,
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
    """rounds: of what has a bar in an issue, at least 7. few_rounds: of the rest."""

    num_bytes: int = 512 << 20
    large_bytes: int = 2 << 30
    small_tensors: int = SMALL_TENSORS
    rounds: int = 9
    # Of what is short, and moves by more from round to round than it is away from its bar.
    small_rounds: int = 21
    cold_rounds: int = 21
    few_rounds: int = 3
    steps_rounds: int = 5
    replica_rounds: int = 41  # of what differs by less than rounds do
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
    """Figure 1."""
    asked = {"num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "warmup": 1, "seed": SEED}
    few = {**asked, "peers": FEW_PEERS, "engines": ["auto"], "repeats": scale.few_rounds}
    main = measured(
        "saves", {**asked, "peers": ALL_PEERS, "engines": ["auto", "direct", "mpio"], "repeats": scale.rounds},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("saving, 2 ranks")
    total = scale.small_tensors * SMALL_BYTES
    settings: dict[str, Any] = {
        **asked, "num_bytes": total, "tensors": {"many": scale.small_tensors, "few": NUM_TENSORS},
    }  # fmt: skip
    # Ours in turn, then beside a peer: what that one leaves behind in the machine's memory costs the next one more
    # than is measured here.
    small = measured(
        "small_saves", {**settings, "peers": (), "repeats": scale.small_rounds}, num_ranks=2, scratch=scratch
    )
    small_beside = measured(
        "small_saves", {**settings, "peers": ["dcp"], "repeats": scale.rounds}, num_ranks=2, scratch=scratch
    )
    say("saving many small tensors")
    beside = {
        "1-rank": measured("saves", few, num_ranks=1, scratch=scratch),
        "4-ranks": measured("saves", few, num_ranks=4, scratch=scratch),
        "2gib": measured("saves", {**few, "num_bytes": scale.large_bytes}, num_ranks=2, scratch=scratch),
    }
    say("saving, other sizes and numbers of ranks")
    what = f"{scale.small_tensors:,} tensors of 4 KiB, 2 ranks"
    return [*save_records(main), *small_records(small, small_beside, what=what), *beside_records(beside)]


def loads(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Figure 2."""
    asked = {
        "num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "seed": SEED,
        "touched_bytes": 6 * scale.num_bytes,
    }  # fmt: skip
    # Ours and raw in turn, with nobody else in the process: what peers leave behind in its memory decides otherwise
    # whether the next one finds large pages.
    warm = measured(
        "loads", {**asked, "cold": False, "peers": (), "repeats": scale.rounds, "warmup": 1},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, warm")
    beside = measured(
        "loads", {**asked, "cold": False, "peers": ("dcp", "torch.save", "safetensors", "h5py mpio"),
                  "repeats": scale.rounds, "warmup": 1},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, beside peers")
    cold = measured(
        "loads", {**asked, "cold": True, "peers": (), "repeats": scale.cold_rounds, "warmup": 0},
        num_ranks=2, scratch=scratch,
    )  # fmt: skip
    say("loading, cold")
    return load_records(warm, cold, beside)


def background(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Figure 3."""
    asked = {"num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "warmup": 1, "seed": SEED}
    stall = measured("stalls", {**asked, "repeats": scale.small_rounds}, num_ranks=2, scratch=scratch)
    say("standing still")
    memory = {
        what: measured("memory", {**asked, "what": what, "saves": 3}, num_ranks=2, scratch=scratch)["ranks"]
        for what in ("ours", "dcp")
    }
    say("memory")
    limits = {"free": None, "limited": scale.limit_mb_per_s, "dcp async": None}
    steps = measured(
        "steps", {**asked, "limits": limits, "repeats": scale.steps_rounds}, num_ranks=2, scratch=scratch
    )  # fmt: skip
    say("training steps beside the writing")
    return [
        stall_record(stall), memory_record(memory), *steps_records(steps, limit_mb_per_s=scale.limit_mb_per_s)
    ]  # fmt: skip


def replicas(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Figure 4."""
    asked = {"num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "warmup": 1, "seed": SEED}
    found = measured(
        "replica_saves", {**asked, "repeats": scale.replica_rounds}, num_ranks=2, scratch=scratch
    )
    say("comparing replicas")
    return [replica_record(found)]
