"""What `hpctrain doctor` does: examine this rank, meet the others, tell once."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.comm.backends.library_probe import probe_mpi_alone, probe_started_mpi
from hpctrain.comm.backends.open_world import open_world
from hpctrain.comm.collectives.agreement import all_gather_json
from hpctrain.errors import HpctrainError
from hpctrain.launch.identity import RankIdentity
from hpctrain.launch.launchers import cure_for
from hpctrain.run.doctor.exit_notice import LastWords
from hpctrain.run.doctor.findings import Finding, Severity, judge, worst
from hpctrain.run.doctor.merge_findings import merge
from hpctrain.run.doctor.probes import identity_of, inspect_rank

_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
_PLAIN_WIDTH = 120


def report(*, run_directory: Path, backend: str, timeout_s: float, as_json: bool) -> Severity:
    """Examine, merge over the ranks where there are several, and print. Collective. The worst level found."""
    facts = inspect_rank(run_directory=run_directory, environ=os.environ, hostname=socket.gethostname())
    identity = identity_of(facts)
    if identity is not None and identity.num_ranks > 1:
        return _report_together(facts, identity, backend=backend, timeout_s=timeout_s, as_json=as_json)
    if "error" not in facts["mpi"]:
        facts["mpi"].update(probe_mpi_alone(timeout_s=timeout_s))
    findings = merge([facts])
    _show(findings, [facts], as_json=as_json)
    return worst(findings)


def _report_together(
    facts: dict[str, Any], identity: RankIdentity, *, backend: str, timeout_s: float, as_json: bool
) -> Severity:
    """Gather the ranks' facts; rank 0 prints one report. Every rank returns the same level. Collective.

    Where the ranks cannot meet, this rank prints its own findings and returns PROBLEM. Where MPI ends the
    process because it cannot start, the findings are printed too, but the exit code is MPI's.
    """
    silence = f"the ranks have not met (MPI may say more): {cure_for(identity.launcher)}"
    try:
        with LastWords(_words(facts, identity, silence), timeout_s=timeout_s):
            opened = open_world(backend, identity=identity)
            world = opened.world
            facts["communication"] = {
                "backend": world.reduction_backend,
                "reason": opened.reason,
                "num_ranks": world.num_ranks,
                "notes": list(opened.notes),
            }
            if "error" not in facts["mpi"]:
                facts["mpi"].update(probe_started_mpi())
            facts_by_rank = all_gather_json(world, facts)
            findings = merge(facts_by_rank)
            if world.rank == 0:
                _show(findings, facts_by_rank, as_json=as_json)
            # The launcher ends all ranks when one leaves with an error: not before rank 0 has spoken.
            world.barrier()
            world.close()
    except HpctrainError as error:
        if "error" not in facts["mpi"] and "mpi4py.MPI" in sys.modules:
            facts["mpi"].update(probe_started_mpi())
        print(_words(facts, identity, str(error)), file=sys.stderr, flush=True)
        return Severity.PROBLEM
    return worst(findings)


def _words(facts: Mapping[str, Any], identity: RankIdentity, failure: str) -> str:
    """This rank's own report, for when there is no other: plain lines, each with the rank before it."""
    findings = judge({**facts, "communication": {"error": failure}})
    prefix = f"hpctrain doctor: rank {identity.rank} on {identity.node_name}:"
    return "\n".join(
        f"{prefix} {finding.level.value}: {finding.topic}: {finding.text}"
        + (f" -> {finding.remedy}" if finding.remedy else "")
        for finding in findings
    )


def _show(findings: Sequence[Finding], facts_by_rank: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        report = {
            "level": worst(list(findings)).value,
            "findings": [finding.to_json() for finding in findings],
            "ranks": list(facts_by_rank),
        }
        print(json.dumps(report, indent=2), flush=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "topic", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        level = Text(finding.level.value, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.topic), Text(finding.text))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}"))
    # Open MPI gives ranks a terminal of its own making, also when its output goes to a file.
    plain = len(facts_by_rank) > 1 or not sys.stdout.isatty()
    console = Console(
        width=_PLAIN_WIDTH if plain else None, force_terminal=False if plain else None, highlight=False
    )
    console.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Severity}
    told = [_counted(count, level.value) for level, count in counts.items() if level is not Severity.OK]
    console.print(f"{counts[Severity.OK]} ok, {', '.join(told)}; {_counted(len(facts_by_rank), 'rank')}")
    sys.stdout.flush()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
