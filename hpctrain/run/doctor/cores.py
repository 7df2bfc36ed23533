"""Cores of a host and the ranks on it: more ranks or threads than cores, and cores that are shared (F8)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm import describe_ranks
from hpctrain.launch import RankCores, core_share, read_cores
from hpctrain.run.doctor.finding import Facts, Finding, ok, warning

TOPIC = "cores"


def probe_cores(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Returns the hardware threads and cores that this rank may use, its CPU limit, and the NUMA nodes they are on."""
    mine = read_cores(root)
    nodes = {path.name: (path / "cpulist") for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
    return {
        "usable": sorted(mine.cpus),
        "of_machine": os.cpu_count(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "share": mine.to_json(),
        "num_numa_nodes": sum(bool(mine.cpus & _cpus(path)) for path in nodes.values()) or 1,
    }


def _cpus(cpulist: Path) -> frozenset[int]:
    try:
        spans = [span.partition("-") for span in cpulist.read_text().strip().split(",") if span]
        return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def judge_cores(facts_of_host: Sequence[Facts], *, ranks: Sequence[int]) -> Finding:
    """Returns the finding about the cores of one host. Pure.

    ranks: the ranks on it, in the order of `facts_of_host`.
    """
    num_ranks = len(facts_of_host)
    usable = {cpu for facts in facts_of_host for cpu in facts["cores"]["usable"]}
    of_machine = max(int(facts["cores"]["of_machine"] or 0) for facts in facts_of_host)
    threads = [int(facts["torch"].get("threads", 1)) for facts in facts_of_host]
    thread_text = f"{min(threads)}" if len(set(threads)) == 1 else f"{min(threads)} to {max(threads)}"
    text = (
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {len(usable)} core{'s' if len(usable) > 1 else ''}, "
        f"{thread_text} thread{'s' if thread_text != '1' else ''} each"
    )
    if num_ranks > len(usable):
        cure = "ranks wait for each other's cores: start fewer ranks, or do not use this for measurements"
        if of_machine > len(usable):
            cure = (
                f"the ranks are bound to {len(usable)} of the machine's {of_machine} cores: use mpirun "
                "--bind-to none, or ask Slurm for more with --cpus-per-task"
            )
        return warning(TOPIC, text, cure)
    crowded = _crowded(facts_of_host, ranks)
    if crowded:
        return warning(
            TOPIC,
            f"{text}; {describe_ranks(crowded)} share cores while others are free",
            "bind each rank to cores of its own (mpirun --map-by slot:PE=N --bind-to core, srun --cpu-bind=cores), or "
            "none (mpirun --bind-to none, srun --cpu-bind=none)",
        )
    limit = min((share.limit for share in _shares(facts_of_host) if share.limit is not None), default=None)
    if limit is not None and sum(threads) > limit:
        return warning(
            TOPIC,
            f"{text}; their control group allows {limit:g} cores' time",
            "ask for more (Docker and Podman: --cpus, Kubernetes: limits.cpu), or start fewer ranks or threads",
        )
    if sum(threads) > len(usable):
        cure = f"set OMP_NUM_THREADS={max(1, len(usable) // num_ranks)} (`hpctrain launch` does)"
        return warning(TOPIC, text, cure)
    numa = max(int(facts["cores"].get("num_numa_nodes", 1)) for facts in facts_of_host)
    return ok(TOPIC, text + (f", a rank may run on {numa} NUMA nodes" if numa > 1 else ""))


def _crowded(facts_of_host: Sequence[Facts], ranks: Sequence[int]) -> list[int]:
    """Returns the ranks with less than a core each, on a host that has at least a core for every rank."""
    shares = _shares(facts_of_host)
    if len(shares) < len(ranks) or len(frozenset().union(*(share.cores for share in shares))) < len(ranks):
        return []
    without_limit = [RankCores(host=share.host, cpus=share.cpus, cores=share.cores) for share in shares]
    return [rank for index, rank in enumerate(ranks) if core_share(without_limit, index) < 1]


def _shares(facts_of_host: Sequence[Facts]) -> list[RankCores]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    return [
        RankCores.from_json(facts["cores"]["share"]) for facts in facts_of_host if "share" in facts["cores"]
    ]
