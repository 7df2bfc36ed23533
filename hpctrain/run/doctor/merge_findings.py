"""Merges the doctor's findings about each rank into one report on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hpctrain.comm import describe_ranks
from hpctrain.launch import cure_for
from hpctrain.run.doctor.environment import judge_clocks, judge_cores, judge_start, judge_variables
from hpctrain.run.doctor.finding import Facts, Finding, Severity, ok, problem, size_text, warning
from hpctrain.run.doctor.network import judge_limits, judge_network
from hpctrain.run.doctor.run_directory import judge_run_directory, judge_visibility
from hpctrain.run.doctor.slurm_settings import judge_slurm
from hpctrain.topology import Topology

# Findings of `hpctrain doctor` about one rank.
#
# `facts` is the result of `hpctrain.run.doctor.probes.inspect_rank` on that rank: JSON values by topic.


_SMALL_SHM_BYTES = 64 * 2**20


def judge_rank(facts: Facts) -> list[Finding]:
    """Returns the findings about one rank that do not depend on other ranks."""
    return [
        _python(facts),
        _torch(facts),
        *_sums(facts),
        _launcher(facts),
        *_yielding(facts),
        _mpi(facts),
        *judge_network(facts),
        _horovod(facts),
        *_communication(facts),
        _hdf5(facts),
        *judge_run_directory(facts),
        _scratch(facts),
        *judge_limits(facts),
    ]


def _python(facts: Facts) -> Finding:
    python = facts["python"]
    return ok("python", f"{python['version']}, hpctrain {python['hpctrain']}")


def _torch(facts: Facts) -> Finding:
    torch = facts["torch"]
    if "error" in torch:
        return problem("torch", torch["error"], "install the project's requirements: make setup")
    devices = torch["devices"]
    if devices:
        kinds = ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
        nccl = f", NCCL {torch['nccl']}" if torch.get("nccl") else ""
        return ok("torch", f"{torch['version']}, {kinds}{nccl}")
    if torch.get("cuda"):
        return warning(
            "torch",
            f"{torch['version']} is built for CUDA {torch['cuda']}, but no device is visible: CPU only",
            "check the driver and CUDA_VISIBLE_DEVICES, or ask Slurm for devices (--gpus-per-node)",
        )
    return ok("torch", f"{torch['version']}, CPU only")


def _sums(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    if facts.get("sums", {}).get("compiled", True):
        return []
    return [
        warning(
            "sums on a node",
            "numpy computes the sums, since hpctrain's C code was not compiled when it was installed",
            "install a C compiler and Python's headers, then hpctrain again (make setup), for sums in half the time",
        )
    ]


def _launcher(facts: Facts) -> Finding:
    launcher = facts["launcher"]
    if "error" in launcher:
        return problem(
            "launcher", launcher["error"], "start the ranks again, from a shell without these variables"
        )
    if launcher["launcher"] == "none":
        return ok("launcher", "none: one rank")
    ranks = f"{launcher['num_ranks']} rank{'s' if launcher['num_ranks'] != 1 else ''}"
    return ok("launcher", f"{launcher['launcher']}, {ranks}")


def _yielding(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    yielding = facts.get("yielding")
    topic = "waiting ranks"
    if yielding is None:
        return []
    if yielding["in_effect"]:
        return [
            ok(
                topic,
                "waiting ranks sleep instead of yielding: the library for more ranks than cores is preloaded",
            )
        ]
    if yielding["library"] is None:
        return [
            warning(
                topic,
                "the library that lets waiting ranks sleep (for more ranks than cores) was not compiled, or is in "
                "a folder with a space or a colon",
                "on Linux 6.18 and newer such ranks may wait for seconds: install a C compiler, then hpctrain again "
                "(make setup)",
            )
        ]
    return [ok(topic, "the library for more ranks than cores is installed, but not preloaded here")]


def _several_ranks(facts: Facts) -> bool:
    return int(facts["launcher"].get("num_ranks", 1)) > 1


def _mpi(facts: Facts) -> Finding:
    mpi = facts["mpi"]
    if "error" in mpi:
        remedy = mpi.get(
            "remedy",
            "make setup installs mpi4py; on a cluster load the MPI module that it was built with first",
        )
        if "cannot start" in mpi["error"] or "did not start" in mpi["error"]:
            return problem("MPI", mpi["error"], cure_for(facts["launcher"].get("launcher", "none")))
        if _several_ranks(facts) and "error" in facts["horovod"]:
            return problem("MPI", f"{mpi['error']}, and there is no Horovod either", remedy)
        return warning("MPI", mpi["error"], remedy)
    if "library" not in mpi:
        return ok("MPI", f"mpi4py {mpi['version']} (MPI was not started)")
    text = f"{mpi['library']} (MPI {mpi['standard']}), mpi4py {mpi['version']}"
    level = mpi.get("thread_level")
    if level is not None and level != "multiple":
        return problem(
            "MPI",
            f"{text}, threads: {level}",
            "hpctrain communicates from two threads: use an MPI built with MPI_THREAD_MULTIPLE",
        )
    return ok("MPI", text + (f", threads: {level}" if level else ""))


def _horovod(facts: Facts) -> Finding:
    horovod = facts["horovod"]
    if "error" in horovod:
        return warning("Horovod", horovod["error"], "MPI is used; make setup builds Horovod")
    built = horovod["built"]
    text = f"{horovod['version']}, built with {', '.join(part.upper() for part in built) or 'nothing'}"
    if "mpi" not in built:
        return warning(
            "Horovod",
            f"{text}, but not with MPI",
            "ranks from mpirun or srun need Horovod built with HOROVOD_WITH_MPI=1: make setup does this",
        )
    if facts["torch"].get("devices") and "nccl" not in built:
        return warning(
            "Horovod",
            f"{text}: gradients on devices are copied through host memory",
            "build it on a machine with NCCL: make setup",
        )
    return ok("Horovod", f"{text}; started only if a reduction uses it")


def _communication(facts: Facts) -> list[Finding]:
    communication = facts.get("communication")
    if communication is None:
        return []
    if "error" in communication:
        return [problem("communication", communication["error"], "")]  # the message contains the remedy
    reason = f" ({communication['reason']})" if communication["reason"] else ""
    text = f"{communication['backend']}{reason}, {communication['num_ranks']} ranks connected"
    if communication["notes"]:
        return [warning("communication", f"{text}; {'; '.join(communication['notes'])}", "make setup")]
    return [ok("communication", text)]


def _hdf5(facts: Facts) -> Finding:
    hdf5 = facts["hdf5"]
    if "error" in hdf5:
        return problem(
            "HDF5", f"h5py: {hdf5['error']}", "data and checkpoints are HDF5: make setup installs h5py"
        )
    text = f"{hdf5['hdf5']}, h5py {hdf5['h5py']}"
    if not hdf5["parallel"]:
        return ok("HDF5", f"{text}, not parallel (hpctrain does not need parallel HDF5)")
    return ok("HDF5", f"{text}, parallel")


def _scratch(facts: Facts) -> Finding:
    scratch = facts["scratch"]
    tmp, shm = scratch["tmp_free_bytes"], scratch["shm_free_bytes"]
    if shm is not None and shm < _SMALL_SHM_BYTES:
        return warning(
            "scratch",
            f"/dev/shm has {size_text(shm)} free",
            "ranks of one node exchange data there: start the container with a larger --shm-size",
        )
    shown = "no /dev/shm" if shm is None else f"/dev/shm {size_text(shm)} free"
    return ok("scratch", f"temporary directory {size_text(tmp)} free, {shown}")


# Merges the facts of all ranks into one report: equal findings once, and differences between ranks.


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
    ("threads per rank", lambda f: f["torch"].get("threads", "unknown")),
    ("usable cores", lambda f: len(f["cores"]["usable"])),
    # Missing in the facts of an older hpctrain, which some rank may have.
    ("environment's path", lambda f: f.get("environment", {}).get("prefix")),
    ("installed packages", lambda f: _packages(f.get("environment", {}))),
    ("kernel", lambda f: f.get("environment", {}).get("kernel")),
    ("C library", lambda f: f.get("environment", {}).get("libc")),
    ("processor", lambda f: f.get("environment", {}).get("processor")),
)


def merge_findings(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns the findings about all ranks.

    facts_by_rank: the facts about each rank, by rank.
    """
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
    """Returns the findings about each rank, with equal findings of several ranks merged.

    The text of a finding that only some ranks have begins with these ranks. If the ranks have OK findings with
    different texts on one topic (free space, for example), only the finding of the lowest rank is kept.
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
    """Returns a warning if nodes use the TCP congestion control BBR, which delays short bursts between nodes."""
    # Missing in the facts of an older hpctrain, which some rank may have.
    names = [facts.get("tcp", {}).get("congestion_control") for facts in facts_by_rank]
    ranks = [rank for rank, name in enumerate(names) if name == "bbr"]
    if not ranks:
        return []
    text = f"{_where(ranks, facts_by_rank)}: BBR: a sum of 1 MB sometimes waits 40 ms for an acknowledgement"
    remedy = "over Ethernet: sysctl net.ipv4.tcp_congestion_control=cubic on the nodes; over InfiniBand it is not used"
    return [Finding(topic="TCP", level=Severity.WARNING, text=text, remedy=remedy)]


def _where(ranks: Sequence[int], facts_by_rank: Sequence[Facts]) -> str:
    """Returns the ranks and their hosts as text, for example `ranks 0-2 (a, b)`."""
    hosts = list(dict.fromkeys(facts_by_rank[rank]["host"] for rank in ranks))
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"{describe_ranks(ranks)} ({shown})"
