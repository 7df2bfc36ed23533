"""Checks InfiniBand and other RDMA networks: whether MPI uses the network, and whether it is safe to fork processes."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hpctrain.run.doctor.finding import Facts, Finding, ok, size_text, warning

# Variables that choose a transport, or make forking safe.
_VARIABLES = (
    "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "I_MPI_FABRICS",
    "I_MPI_OFI_PROVIDER", "MPICH_OFI_USE_PROVIDER", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE",
)  # fmt: skip
_RDMA_BTLS = {"openib", "uct", "ofi", "usnic"}
_MEANS = (
    ("mca_pml_ucx", "UCX"), ("libucp", "UCX"), ("mca_mtl_psm2", "PSM2"), ("mca_mtl_ofi", "libfabric"),
    ("libfabric", "libfabric"),
)  # fmt: skip
_TCP_PROVIDERS = {"tcp", "sockets", "udp", "net"}
# UCX's transports over RDMA, without the endings that choose a variant.
_UCX_RDMA = ("all", "ib", "rc", "ud", "dc")
# Since this kernel a fork copies memory that is registered with an RDMA device.
_COPIES_AT_FORK = (5, 12)
_SAFE_FORK = "start processes afresh (multiprocessing_context='spawn'), as hpctrain's own workers are"


def read_network(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Returns the ports of RDMA devices, whether this process may open them, and variables that choose transports.

    root: the directory that contains `sys` and `dev`.
    """
    ports = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, layer, rate = (_read(port / name) for name in ("state", "link_layer", "rate"))
        ports.append(
            {
                "device": port.parent.parent.name,
                "port": port.name,
                "active": "ACTIVE" in state,  # the file says, for example, `4: ACTIVE`
                "layer": layer,
                "rate": rate.partition(" (")[0],
            }
        )
    devices = list((root / "dev/infiniband").glob("uverbs*"))
    return {
        "ports": ports,
        "may_open": any(os.access(device, os.R_OK | os.W_OK) for device in devices),
        "variables": {name: environ[name] for name in _VARIABLES if environ.get(name)},
        "kernel": platform.release(),
    }


def judge_network(facts: Facts) -> list[Finding]:
    """Returns the findings about the RDMA network of a rank's node: whether MPI uses it, and fork safety. Pure."""
    network = facts.get("network")  # missing in the facts of an older hpctrain
    if network is None:
        return []
    topic, active = "network", [port for port in network["ports"] if port["active"]]
    if not network["ports"]:
        return [
            ok(topic, "no InfiniBand or other RDMA device: TCP between nodes"),
            ok("fork safety", "no RDMA device whose memory a forked process could damage"),
        ]
    if not active:
        names = ", ".join(f"{port['device']} port {port['port']}" for port in network["ports"])
        cure = "the site must bring a port up (cable, subnet manager); until then nodes communicate over TCP"
        return [warning(topic, f"no port of the RDMA devices is active: {names}", cure)]
    shown = ", ".join(f"{port['device']} {port['rate']} ({port['layer']})" for port in active)
    return [_transport(shown, network, facts["mpi"].get("transports", [])), _fork(network, facts["mpi"])]


def _transport(shown: str, network: Mapping[str, Any], transports: list[str]) -> Finding:
    topic = "network"
    if not network["may_open"]:
        return warning(
            topic,
            f"{shown} is there, but this process may not open /dev/infiniband/uverbs*: TCP is used",
            "in a container pass the devices on (Docker and Podman: --device=/dev/infiniband), else ask the site "
            "for the right to use them",
        )
    forced = keeps_to_tcp(network["variables"])
    if forced is not None:
        return warning(
            topic, f"{shown} is there, but {forced} keeps communication on TCP", "unset the variable"
        )
    if "mca_pml_ob1" in transports and not {f"mca_btl_{name}" for name in _RDMA_BTLS} & set(transports):
        return warning(
            topic,
            f"{shown} is there, but Open MPI uses its component ob1 without any RDMA transport: TCP between nodes",
            "use an Open MPI that is built with UCX (ompi_info | grep ucx), and for Omni-Path with PSM2; the site's "
            "MPI module usually is",
        )
    through = next((means for name, means in _MEANS if name in transports), None)
    return ok(
        topic, f"{shown}, " + (f"through {through}" if through else "MPI does not show whether it uses it")
    )


def keeps_to_tcp(variables: Mapping[str, str]) -> str | None:
    """Returns the setting, as NAME=VALUE, that keeps MPI from using an RDMA network; None if no variable does. Pure."""
    pml, btl = variables.get("OMPI_MCA_pml", ""), variables.get("OMPI_MCA_btl", "")
    if pml == "ob1" and btl and not btl.startswith("^") and not _RDMA_BTLS & set(btl.split(",")):
        return f"OMPI_MCA_pml={pml} with OMPI_MCA_btl={btl}"
    tls = [name.strip() for name in variables.get("UCX_TLS", "").split(",") if name.strip()]
    if tls and not tls[0].startswith("^") and not any(name.startswith(_UCX_RDMA) for name in tls):
        return f"UCX_TLS={variables['UCX_TLS']}"
    for name in ("FI_PROVIDER", "I_MPI_OFI_PROVIDER", "MPICH_OFI_USE_PROVIDER"):
        if variables.get(name, "").partition(";")[0] in _TCP_PROVIDERS:
            return f"{name}={variables[name]}"
    if "tcp" in variables.get("I_MPI_FABRICS", "").split(":"):
        return f"I_MPI_FABRICS={variables['I_MPI_FABRICS']}"
    return None


def _fork(network: Mapping[str, Any], mpi: Mapping[str, Any]) -> Finding:
    """Returns the finding about what a fork of this process does to memory registered with an RDMA device."""
    topic = "fork safety"
    state = mpi.get("rdma_fork")
    asked = any(network["variables"].get(name, "0") != "0" for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE"))
    if state == "unneeded" or (state is None and kernel_version(network["kernel"]) >= _COPIES_AT_FORK):
        return ok(topic, f"kernel {network['kernel']} copies memory of RDMA devices at a fork")
    if state == "enabled" or asked:
        return ok(topic, "libibverbs keeps memory of RDMA devices from forked processes")
    return warning(
        topic,
        f"a fork (DataLoader with workers, subprocess) may corrupt memory that the RDMA device uses: kernel "
        f"{network['kernel']} and libibverbs do not prevent it",
        f"set RDMAV_FORK_SAFE=1 for the ranks, and with huge pages RDMAV_HUGEPAGES_SAFE=1; or {_SAFE_FORK}",
    )


def kernel_version(release: str) -> tuple[int, int]:
    """Returns the major and minor version of a kernel release: (5, 14) for `5.14.0-427.el9`. Pure."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# Limits of the process that a run may hit: open files, and locked memory for RDMA networks.


_MIN_OPEN_FILES = 1024
_RAISE = "LimitNOFILE of slurmd's unit, or /etc/security/limits.conf"


def read_limits() -> dict[str, Any]:
    """Returns this process's limits of open files and locked bytes, and the memory of this machine in bytes.

    Each limit is a pair of soft and hard limit, where None is unlimited.
    """
    return {
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _limit(kind: int) -> list[int | None]:
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)]


def judge_limits(facts: Facts) -> list[Finding]:
    """Returns the findings about the limits of one rank. Pure."""
    limits = facts.get("limits")  # missing in the facts of an older hpctrain
    if limits is None:
        return []
    findings = []
    soft, hard = limits["open_files"]
    # A connection to each other rank, in both directions, and as many shards and libraries as a rank keeps open.
    needed = max(_MIN_OPEN_FILES, 4 * int(facts["launcher"].get("num_ranks", 1)) + 512)
    if soft is not None and soft < needed:
        findings.append(
            warning(
                "open files",
                f"at most {soft} (hard limit {hard if hard is not None else 'none'}), and this run may need {needed}",
                f"ulimit -n {needed} in the batch script"
                if hard is None or hard >= needed
                else f"ask the site for a hard limit of {needed} or more ({_RAISE})",
            )
        )
    locked = limits["locked_bytes"][0]
    has_rdma = any(port["active"] for port in facts.get("network", {}).get("ports", []))
    if has_rdma and locked is not None and locked < limits["memory_bytes"]:
        findings.append(
            warning(
                "locked memory",
                f"at most {size_text(locked)}: RDMA networks lock what they send, and fail or fall back to TCP",
                "ulimit -l unlimited in the shell that calls sbatch, if the hard limit allows it; else the site must "
                "set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK "
                "(containers: --ulimit memlock=-1)",
            )
        )
    if not findings:
        locked_text = "without limit" if locked is None else size_text(locked)
        findings.append(ok("limits", f"open files {soft or 'without limit'}, locked memory {locked_text}"))
    return findings
