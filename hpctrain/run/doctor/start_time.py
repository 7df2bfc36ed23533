"""How long Python took to start and to import what a rank needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm import describe_ranks
from hpctrain.launch import seconds_since_start
from hpctrain.run.doctor.finding import Facts, Finding, ok, warning
from hpctrain.storage import filesystem_of

# Imports of torch, h5py and MPI take two to five seconds from a local disk.
_SLOW_SHARED_S = 10.0
_SLOW_LOCAL_S = 30.0


def read_start(*, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Returns the seconds since this process was started, and the filesystem of its Python environment.

    To be called as soon as the imports are done.
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
    """Returns the finding about the slowest rank. Entry r of `facts_by_rank` is from rank r. Pure."""
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
