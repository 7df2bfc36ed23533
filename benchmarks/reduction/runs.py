"""The measurements of each figure, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.reduction.bounds import bytes_out_of_a_node
from benchmarks.reduction.figures import (
    RING,
    YIELDING,
    bytes_records,
    step_records,
    sweep_records,
    time_records,
)
from benchmarks.reduction.models import WORKLOADS
from benchmarks.reduction.ours import name_of
from benchmarks.reduction.places import OnCluster, OneNode
from benchmarks.results_file import Record

Choice = tuple[str, str]
ALGORITHMS = ("hierarchical", "hierarchical-ring", "hierarchical-flat", "direct", "ring", "flat")
RANKS_PER_NODE = 2
ONE_NODE_RANKS = 2
SEED = 20
# The choices called "ours" in figure 2: selected in trials during development and fixed before a run.
OURS_16: Choice = ("hierarchical-ring", "fp16")
OURS_8: Choice = ("hierarchical-ring", "int8")
# Also shown in figure 2, without bars.
OTHERS: tuple[Choice, ...] = (
    ("hierarchical", "fp32"),
    ("hierarchical", "bf16"),
    ("hierarchical", "fp16"),
    ("hierarchical", "int8"),  # rounds twice; the ring rounds at each rank that a value passes
    ("flat", "fp32"),
)
# Of figure 2. Methods that call MPI_Allreduce are timed again with Open MPI's ring, which on slow links is a third
# faster than Open MPI's own choice for eight ranks (Rabenseifner is not faster; the hierarchical `han` crashes in
# 4.1.4).
FAMILIES = ("ours", "mpi", "horovod", "gloo", "stream")
RING_FAMILIES = ("ours", "mpi", "horovod")
USE_RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
# Of figure 3: plain MPI, with whose parameters `steps.check` compares all others; hpctrain, torch, Horovod.
YIELDING_METHODS = ("mpi-fp32", "ours-fp32", "ours-fp16", "horovod-fp32", "horovod-fp16")
STEP_METHODS = (*YIELDING_METHODS, "ddp-fp32", "ddp-fp16")
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
FIXED: tuple[Choice, ...] = tuple((name, wire) for wire in ("fp32", "fp16") for name in ALGORITHMS)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. others: choices of figure 2 without bars. budget_s: time for one size in figure 4,
    after which no more rounds begin."""

    bytes_numel: int = 25_000_000
    times_numel: int = 4_194_304  # 16 MiB
    time_rounds: int = 9
    others: tuple[Choice, ...] = OTHERS
    step_rounds: int = 10  # of each start
    steps_per_block: int = 10
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    sweep_numels: tuple[int, ...] = tuple(1 << power for power in range(10, 26, 2))  # 4 KiB to 64 MiB
    # The same choice measured twice differs by 10 to 20 % over 15 rounds, so there are as many as fit into the budget.
    sweep_rounds: int = 101
    # `auto` may choose a wire too, never one with fewer than 16 bits; it is compared with both wires.
    auto: Choice = ("auto", "auto")
    budget_s: float = 15.0
    timeout_s: float = 900.0


FULL = Scale()
QUICK = replace(
    FULL, bytes_numel=50_000, times_numel=50_000, time_rounds=1, step_rounds=1, steps_per_block=1,
    workloads=("mlp",), sweep_numels=(1000,), sweep_rounds=3, timeout_s=120.0,
)  # fmt: skip

Run = Callable[[OneNode, OnCluster | None, Scale], list[Record]]


def _bytes(_: OneNode, cluster: OnCluster | None, scale: Scale) -> list[Record]:
    if cluster is None:
        return []
    cluster.cluster.set_rate("1gbit")
    settings = {
        "numel": scale.bytes_numel,
        "choices": [(name, "fp16") for name in ALGORITHMS],
        "pause_s": 2.0,
    }
    found = cluster.run("counted_bytes", settings, timeout_s=scale.timeout_s)
    return bytes_records(
        found, numel=scale.bytes_numel, elem_bytes=2,
        num_nodes=cluster.cluster.plan.num_nodes, ranks_per_node=RANKS_PER_NODE,
    )  # fmt: skip


def _times(rate: str, *, full: bool) -> Run:
    def run(_: OneNode, cluster: OnCluster | None, scale: Scale) -> list[Record]:
        if cluster is None:
            return []
        cluster.cluster.set_rate(rate)
        bound = bytes_out_of_a_node(
            OURS_16[0], numel=scale.times_numel, elem_bytes=2,
            num_nodes=cluster.cluster.plan.num_nodes, ranks_per_node=RANKS_PER_NODE,
        )  # fmt: skip
        settings: dict[str, Any] = {
            "numel": scale.times_numel, "choices": [OURS_16, OURS_8, *scale.others], "stream_bytes": int(bound),
            "num_rounds": scale.time_rounds, "seed": SEED,
        }  # fmt: skip
        found = cluster.run("buffers", {**settings, "families": FAMILIES}, timeout_s=scale.timeout_s)
        again = {**settings, "families": RING_FAMILIES, "choices": [OURS_16]}
        with_ring = cluster.run("buffers", again, timeout_s=scale.timeout_s, variables=USE_RING)
        found |= {f"{name}{RING}": samples for name, samples in with_ring.items()}
        return time_records(
            found, rate=rate, ours_16=name_of(*OURS_16), ours_8=name_of(*OURS_8),
            bound_bytes=bound, stream_bytes=int(bound), full=full,
        )  # fmt: skip

    return run


def _steps(one_node: OneNode, _: OnCluster | None, scale: Scale) -> list[Record]:
    """Measures training steps: with ranks as `hpctrain launch` starts them, and methods that use MPI again with ranks
    that yield while they wait, which is faster for Horovod. hpctrain is measured in both settings too."""
    found: dict[str, dict[str, Any]] = {name: {} for name in scale.workloads}
    for suffix, methods, variables in (("", STEP_METHODS, {}), (YIELDING, YIELDING_METHODS, YIELD)):
        settings = {
            "workloads": list(scale.workloads), "num_rounds": scale.step_rounds,
            "block": scale.steps_per_block, "seed": SEED, "methods": methods,
        }  # fmt: skip
        one = one_node.run("training_steps", settings, timeout_s=scale.timeout_s, variables=variables)
        for workload, of in one.items():
            found[workload] |= {f"{method}{suffix}": times for method, times in of.items()}
    per_step = {name: ONE_NODE_RANKS * WORKLOADS[name].samples_per_step for name in scale.workloads}
    return step_records(found, samples_per_step=per_step)


def _sweep(rate: str | None) -> Run:
    def run(one_node: OneNode, cluster: OnCluster | None, scale: Scale) -> list[Record]:
        settings = {
            "choices": FIXED, "auto": scale.auto, "numels": list(scale.sweep_numels),
            "num_rounds": scale.sweep_rounds, "budget_s": scale.budget_s, "seed": SEED,
        }  # fmt: skip
        if rate is None:
            found = one_node.run("sweep", settings, timeout_s=scale.timeout_s)
        elif cluster is None:
            return []
        else:
            cluster.cluster.set_rate(rate)
            found = cluster.run("sweep", settings, timeout_s=scale.timeout_s)
        return sweep_records(found, place=rate or "one-node", auto=name_of(*scale.auto))

    return run


FIGURES: dict[int, list[tuple[str, Run]]] = {
    1: [("bytes out of a node", _bytes)],
    2: [
        ("16 MB at 200 Mbit/s", _times("200mbit", full=True)),
        ("16 MB at 1 Gbit/s", _times("1gbit", full=False)),
    ],
    3: [("training steps on one node", _steps)],
    4: [
        ("auto on one node", _sweep(None)),
        ("auto at 1 Gbit/s", _sweep("1gbit")),
        ("auto at 200 Mbit/s", _sweep("200mbit")),
    ],
}
