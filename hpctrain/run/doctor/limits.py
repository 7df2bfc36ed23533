"""Limits of the process that a run may hit: open files, and locked memory for RDMA networks."""

from __future__ import annotations

import resource
from typing import Any

import psutil

from hpctrain.run.doctor.finding import Facts, Finding, ok, size_text, warning

_MIN_OPEN_FILES = 1024
_RAISE = "LimitNOFILE of slurmd's unit, or /etc/security/limits.conf"


def read_limits() -> dict[str, Any]:
    """Returns the soft and hard limits, None for no limit, and the memory of this machine in bytes."""
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
