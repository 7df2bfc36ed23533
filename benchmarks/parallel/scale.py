"""Sizes of the measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.parallel.planned.runs import MODELS, QUICK_MODELS


@dataclass(frozen=True, kw_only=True)
class Scale:
    """traffic_nodes: of the cluster, of which each has one rank, or two. times: nodes and ranks on each that are timed,
    and the rates of their links; one node is this machine. batch: samples of a rank in a timed step. rounds: of the
    timed turns, each of `turn_steps` steps. bubble_*: of the stages that sleep, on `bubble_ranks` ranks of one node.
    checkpoint_ranks: that load; the first of them have saved. timeout_s: of a launch. turn_timeout_s: of the start of a
    method that is timed, and of a turn."""

    equality_ranks: tuple[int, ...] = (1, 2, 4, 8)
    equality_steps: int = 20
    memory_ranks: tuple[int, ...] = (2, 4)
    memory_workload: str = "50M"
    planned_models: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MODELS)
    traffic_nodes: int = 4
    traffic_workload: str = "sent"
    traffic_steps: int = 3
    times: Mapping[tuple[int, int], Sequence[str]] = field(
        default_factory=lambda: {
            (1, 2): ("",),
            (4, 1): ("1gbit", "200mbit"),
            (4, 2): ("1gbit", "200mbit"),
        }
    )
    batch: int = 4
    warmup_steps: int = 3
    turn_steps: int = 2
    rounds: int = 5
    bubble_ranks: int = 4
    bubble_micro_batches: tuple[int, ...] = (8, 16)
    bubble_message_bytes: tuple[int, ...] = (1 << 10, 1 << 20)
    bubble_steps: int = 3
    checkpoint_ranks: tuple[int, ...] = (4, 2)
    timeout_s: float = 600.0
    turn_timeout_s: float = 240.0


FULL = Scale()
QUICK = replace(
    FULL, equality_ranks=(2,), equality_steps=5, memory_ranks=(2,), memory_workload="3M",
    planned_models=QUICK_MODELS, traffic_nodes=2,
    traffic_workload="3M", traffic_steps=1, times={(1, 2): ("",)}, turn_steps=1, rounds=1, bubble_ranks=2,
    bubble_micro_batches=(4,), bubble_message_bytes=(1 << 10,), bubble_steps=1, checkpoint_ranks=(2,),
)  # fmt: skip
