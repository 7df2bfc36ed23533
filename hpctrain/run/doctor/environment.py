"""Reads and judges a host for the doctor: its environment, cores, clock, and the time that a start takes."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm import Collective, describe_ranks
from hpctrain.launch import RankCores, core_share, read_cores, seconds_since_start
from hpctrain.run.doctor.finding import Facts, Finding, ok, warning
from hpctrain.storage import filesystem_of, hash_of

# What must not differ between ranks unnoticed: variables, packages, kernel and processor.


# Of launchers only the variables that users set: others name the rank, and differ by design.
_PREFIXES = (
    "OMP_", "KMP_", "MKL_", "OPENBLAS_", "UCX_", "FI_", "NCCL_", "HOROVOD_", "HDF5_", "HPCTRAIN_", "TORCH_", "PYTORCH_",
    "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_coll", "OMPI_MCA_io", "OMPI_MCA_osc", "OMPI_MCA_mpi_",
    "I_MPI_FABRICS", "I_MPI_OFI_", "I_MPI_PIN", "MPICH_OFI_",
)  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
_SET_BY_LAUNCHERS = ("I_MPI_PIN_INFO", "I_MPI_PIN_MAPPING")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL")
_LONG_CHARS = 120


def read_environment(environ: Mapping[str, str], *, search_path: Iterable[str] = sys.path) -> dict[str, Any]:
    """Returns the environment variables that change how a rank runs, and facts about the node and its packages.

    Secrets are left out. Long values are replaced by their hashes, since the facts of each rank are sent to all ranks.
    """
    variables = {
        name: text
        if len(text) <= _LONG_CHARS
        else f"{len(text)} characters, hash {hash_of(text.encode())[:8]}"
        for name, text in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and not (_SECRET.search(name) or name in _SET_BY_LAUNCHERS)
    }
    packages = sorted(
        {entry for folder in search_path for entry in _entries(folder) if entry.endswith("-info")}
    )
    return {
        "variables": variables,
        "num_packages": len(packages),
        "packages": hash_of("\n".join(packages).encode())[:8],
        "prefix": sys.prefix,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor(),
    }


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []  # not all entries of the search path exist, and some are archives


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def judge_variables(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns one warning per environment variable that differs between ranks. Pure.

    facts_by_rank: the facts about each rank, by rank.
    """
    by_rank = [facts.get("environment", {}).get("variables", {}) for facts in facts_by_rank]
    findings = []
    for name in sorted({name for variables in by_rank for name in variables}):
        ranks: dict[str, list[int]] = {}
        for rank, variables in enumerate(by_rank):
            ranks.setdefault(variables.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            shown = ", ".join(
                f"{value or 'empty'} on {describe_ranks(those)}" for value, those in ranks.items()
            )
            cure = (
                f"set it for all ranks or for none: in the batch script, or by mpirun -x {name} (Open MPI), mpiexec "
                f"-genvlist {name} (MPICH, Intel MPI)"
            )
            findings.append(warning("variables", f"{name} differs between ranks: {shown}", cure))
    return findings


# How long Python took to start and to import what a rank needs.


# Imports of torch, h5py and MPI take two to five seconds from a local disk.
_SLOW_SHARED_S = 10.0
_SLOW_LOCAL_S = 30.0


def read_start(*, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Returns the seconds since this process started, and the filesystem that holds its Python environment.

    Call this function as soon as the imports are done, so that the seconds are the duration of the start.
    """
    filesystem = filesystem_of(Path(sys.prefix))
    facts: dict[str, Any] = {"kind": filesystem.kind, "is_shared": filesystem.is_shared, "prefix": sys.prefix}
    seconds = seconds_since_start(os.environ, proc=proc)
    if seconds is None:
        facts["error"] = "the system does not tell when the process was started"
    else:
        facts["seconds"] = round(seconds, 2)
    return facts


def judge_start(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns the finding about the rank whose program took longest to start. Pure.

    facts_by_rank: the facts about each rank, by rank.
    """
    seconds = {
        rank: facts["start"]["seconds"]
        for rank, facts in enumerate(facts_by_rank)
        if "seconds" in facts.get("start", {})  # missing in the facts of an older hpctrain
    }
    if not seconds:
        return []
    rank = max(seconds, key=lambda rank: seconds[rank])
    start = facts_by_rank[rank]["start"]
    where = (
        f", {describe_ranks([rank])} on {facts_by_rank[rank]['host']} the slowest" if len(seconds) > 1 else ""
    )
    text = f"{seconds[rank]:.1f} s until everything was imported from {start['kind']}{where}"
    if start["is_shared"] and seconds[rank] > _SLOW_SHARED_S:
        remedy = (
            "`hpctrain stage-environment` packs the environment, to be unpacked on the nodes' own disks; "
            "ranks that are forked import once on each node (docs/guides/starting.md)"
        )
        return [warning("start of Python", text, remedy)]
    if seconds[rank] > _SLOW_LOCAL_S:
        remedy = "the node's disk is slow, or its cores are busy with something else: see `top` there"
        return [warning("start of Python", text, remedy)]
    return [ok("start of Python", text)]


# Cores of a host and the ranks on it: more ranks or threads than cores, and cores that are shared (F8).


TOPIC = "cores"


def probe_cores(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Returns the hardware threads and cores that this rank may use, its CPU limit, and its number of NUMA nodes."""
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

    ranks: the ranks on the host, in the order of `facts_of_host`.
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
        cure = "ranks wait for each other's cores: start fewer ranks, or measure no speed on this machine"
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
            f"{text}; their control group limits them to the CPU time of {limit:g} cores",
            "ask for more (Docker and Podman: --cpus, Kubernetes: limits.cpu), or start fewer ranks or threads",
        )
    if sum(threads) > len(usable):
        cure = f"set OMP_NUM_THREADS={max(1, len(usable) // num_ranks)} (`hpctrain launch` does)"
        return warning(TOPIC, text, cure)
    numa = max(int(facts["cores"].get("num_numa_nodes", 1)) for facts in facts_of_host)
    return ok(TOPIC, text + (f", a rank may run on {numa} NUMA nodes" if numa > 1 else ""))


def _crowded(facts_of_host: Sequence[Facts], ranks: Sequence[int]) -> list[int]:
    """Returns the ranks with less than one core, on a host that has at least one core per rank."""
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


# Whether the nodes' clocks agree, from barriers: no rank leaves one before every rank has entered it.


_ROUNDS = 8
_MAX_SKEW_S = 1.0


def sample_clock(comm: Collective) -> list[tuple[float, float]]:
    """Returns this node's clock times, in seconds, before and after each of several barriers. Collective."""
    samples = []
    for _ in range(_ROUNDS):
        before_s = time.time()
        comm.barrier()
        samples.append((before_s, time.time()))
    return samples


def skew_bounds(
    mine: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Returns the lower and upper bound of this clock's lead over the reference clock, in seconds. Pure.

    mine, reference: the results of `sample_clock` for this clock and for the reference clock. In true time, every rank
    leaves a barrier after every rank has entered it. Therefore this clock's time of entry, less the lead, is not after
    the reference clock's time of exit; and the reference clock's time of entry is not after this clock's time of exit,
    less the lead.
    """
    least = max(before - other_after for (before, _), (_, other_after) in zip(mine, reference, strict=True))
    greatest = min(
        after - other_before for (_, after), (other_before, _) in zip(mine, reference, strict=True)
    )
    return least, greatest


def judge_clocks(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns the finding about the clocks of the hosts, each compared with the clock of rank 0's host. Pure."""
    samples = {facts["host"]: facts["clock"] for facts in reversed(facts_by_rank) if facts.get("clock")}
    reference = facts_by_rank[0]["host"]
    if len(samples) < 2 or reference not in samples:
        return []
    bounds = {
        host: skew_bounds(mine, samples[reference]) for host, mine in samples.items() if host != reference
    }
    leads = {host: least if least > 0 else min(greatest, 0.0) for host, (least, greatest) in bounds.items()}
    wrong = {host: lead for host, lead in leads.items() if abs(lead) > _MAX_SKEW_S}
    if not wrong:
        spread_s = max(max(abs(least), abs(greatest)) for least, greatest in bounds.values())
        return [ok("clocks", f"those of {len(samples)} hosts agree within {spread_s:.3f} s")]
    named = [
        f"{host} {abs(lead):.1f} s {'ahead' if lead > 0 else 'behind'}"
        for host, lead in sorted(wrong.items())
    ]
    shown = ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")
    cure = "the site must run chrony or ntpd there: times in records and logs, and Slurm's credentials, are compared"
    return [warning("clocks", f"compared with {reference}: {shown}", cure)]
