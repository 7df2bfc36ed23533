"""Merges the facts of all ranks into one report: equal findings once, and differences between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hpctrain.comm import describe_ranks
from hpctrain.run.doctor.clock import judge_clocks
from hpctrain.run.doctor.cores import judge_cores
from hpctrain.run.doctor.environment import judge_variables
from hpctrain.run.doctor.finding import Facts, Finding, Severity
from hpctrain.run.doctor.findings import judge_rank
from hpctrain.run.doctor.run_directory import judge_visibility
from hpctrain.run.doctor.slurm_settings import judge_slurm
from hpctrain.run.doctor.start_time import judge_start
from hpctrain.topology import Topology

# Facts that must be the same on every rank: (topic, function that reads the value from a rank's facts).
_SAME: tuple[tuple[str, Callable[[Facts], Any]], ...] = (
    ("python", lambda f: ".".join(f["python"]["version"].split(".")[:2])),
    ("hpctrain", lambda f: f["python"]["hpctrain"]),
    ("torch", lambda f: f["torch"].get("version", "missing")),
    ("torch's CUDA", lambda f: f["torch"].get("cuda") or "none"),
    ("devices", lambda f: ", ".join(f["torch"].get("devices", [])) or "none"),
    ("MPI", lambda f: f["mpi"].get("library", "unknown")),
    ("mpi4py", lambda f: f["mpi"].get("version", "missing")),
    ("Horovod", lambda f: f["horovod"].get("version", "missing")),
    ("Horovod's parts", lambda f: ", ".join(f["horovod"].get("built", [])) or "none"),
    ("h5py", lambda f: f["hdf5"].get("h5py", "missing")),
    ("HDF5", lambda f: f["hdf5"].get("hdf5", "missing")),
    ("parallel HDF5", lambda f: "yes" if f["hdf5"].get("parallel") else "no"),
    ("launcher", lambda f: f["launcher"].get("launcher", "contradictory")),
    ("run directory", lambda f: f["run_directory"]["path"]),
    ("run directory's filesystem", lambda f: f["run_directory"].get("kind", "unusable")),
)
_SAME_IF_POSSIBLE: tuple[tuple[str, Callable[[Facts], Any]], ...] = (
    ("threads of a rank", lambda f: f["torch"].get("threads", "unknown")),
    ("usable cores", lambda f: len(f["cores"]["usable"])),
    # Missing in the facts of an older hpctrain, which some rank may have.
    ("environment's path", lambda f: f.get("environment", {}).get("prefix")),
    ("installed packages", lambda f: _packages(f.get("environment", {}))),
    ("kernel", lambda f: f.get("environment", {}).get("kernel")),
    ("C library", lambda f: f.get("environment", {}).get("libc")),
    ("processor", lambda f: f.get("environment", {}).get("processor")),
)


def merge_findings(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns the findings about all ranks. Entry r of `facts_by_rank` is from rank r."""
    return [
        *_fold(facts_by_rank),
        *judge_visibility(facts_by_rank),
        *judge_start(facts_by_rank),
        *_placement(facts_by_rank),
        *judge_clocks(facts_by_rank),
        *judge_slurm(facts_by_rank[0].get("slurm"), mpi_library=facts_by_rank[0]["mpi"].get("library", "")),
        *_differences(facts_by_rank, rows=_SAME, level=Severity.PROBLEM),
        *_differences(facts_by_rank, rows=_SAME_IF_POSSIBLE, level=Severity.WARNING),
        *judge_variables(facts_by_rank),
    ]


def _packages(environment: Facts) -> str:
    return f"{environment.get('num_packages')} ({environment.get('packages')})"


def _fold(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Each rank's own findings, equal ones once. A finding of some ranks only is prefixed with these ranks.

    Of OK findings with different texts (free space, for example) only that of the lowest rank is kept.
    """
    ranks_by_finding: dict[Finding, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        for finding in judge_rank(facts):
            ranks_by_finding.setdefault(finding, []).append(rank)
    merged: list[Finding] = []
    good: set[str] = set()
    for finding, ranks in ranks_by_finding.items():
        if finding.level is Severity.OK:
            if finding.topic not in good:
                merged.append(finding)
            good.add(finding.topic)
        elif len(ranks) == len(facts_by_rank):
            merged.append(finding)
        else:
            merged.append(replace(finding, text=f"{_where(ranks, facts_by_rank)}: {finding.text}"))
    topics = list(dict.fromkeys(finding.topic for finding in merged))
    return sorted(merged, key=lambda finding: topics.index(finding.topic))


def _differences(
    facts_by_rank: Sequence[Facts], *, rows: Sequence[tuple[str, Callable[[Facts], Any]]], level: Severity
) -> list[Finding]:
    findings = []
    for topic, read in rows:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            ranks_by_value.setdefault(str(read(facts)), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = (f"{value} on {_where(ranks, facts_by_rank)}" for value, ranks in ranks_by_value.items())
            findings.append(
                Finding(
                    topic=topic,
                    level=level,
                    text=f"differs between ranks: {', '.join(parts)}",
                    remedy="give every rank the same environment and nodes of one kind",
                )
            )
    return findings


def _placement(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    findings = []
    if not any("error" in facts["launcher"] for facts in facts_by_rank):
        topology = Topology.from_node_names(
            [facts["launcher"]["node_name"] for facts in facts_by_rank],
            emulated=any(facts["launcher"]["emulated"] for facts in facts_by_rank),
        )
        names = ", ".join(topology.node_names[:8]) + (", ..." if topology.num_nodes > 8 else "")
        findings.append(Finding(topic="topology", level=Severity.OK, text=f"{topology.describe()}: {names}"))
        findings += _tcp(facts_by_rank) if topology.num_nodes > 1 and not topology.emulated else []
    ranks_by_host: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        ranks_by_host.setdefault(facts["host"], []).append(rank)
    by_host = {
        host: judge_cores([facts_by_rank[rank] for rank in ranks], ranks=ranks)
        for host, ranks in ranks_by_host.items()
    }
    hosts_by_finding: dict[Finding, list[str]] = {}
    for host, finding in by_host.items():
        hosts_by_finding.setdefault(finding, []).append(host)
    for finding, hosts in hosts_by_finding.items():
        on = "" if len(hosts_by_finding) == 1 and len(hosts) == 1 else f" on {', '.join(hosts)}"
        findings.append(replace(finding, text=finding.text + on))
    return findings


def _tcp(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Warns of BBR as TCP's congestion control, which delays short bursts between nodes."""
    # Missing in the facts of an older hpctrain, which some rank may have.
    names = [facts.get("tcp", {}).get("congestion_control") for facts in facts_by_rank]
    ranks = [rank for rank, name in enumerate(names) if name == "bbr"]
    if not ranks:
        return []
    text = f"{_where(ranks, facts_by_rank)}: BBR: a sum of 1 MB sometimes waits 40 ms for an acknowledgement"
    remedy = "over Ethernet: sysctl net.ipv4.tcp_congestion_control=cubic on the nodes; over InfiniBand it is not used"
    return [Finding(topic="TCP", level=Severity.WARNING, text=text, remedy=remedy)]


def _where(ranks: Sequence[int], facts_by_rank: Sequence[Facts]) -> str:
    """The ranks and their hosts, for example `ranks 0-2 (a, b)`."""
    hosts = list(dict.fromkeys(facts_by_rank[rank]["host"] for rank in ranks))
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"{describe_ranks(ranks)} ({shown})"
