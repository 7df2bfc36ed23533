"""The implementation of `hpctrain doctor`: examines every rank, gathers the findings, and prints one report."""

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

from hpctrain.comm import all_gather_json, open_world, probe_mpi_alone, probe_started_mpi
from hpctrain.errors import HpctrainError
from hpctrain.launch import RankIdentity, cure_for
from hpctrain.run import (
    ExitNotice,
    Finding,
    Severity,
    ask_slurm,
    identity_from,
    inspect_rank,
    judge_rank,
    look_for_rank_0s_file,
    merge_findings,
    sample_clock,
    worst_severity,
)

_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
_PLAIN_WIDTH = 120


def report(
    *,
    run_directory: Path,
    num_checkpoints: int,
    checkpoint_bytes: int | None,
    backend: str,
    timeout_s: float,
    as_json: bool,
) -> Severity:
    """Examines this rank, merges the findings of all ranks, and prints them. Returns the worst severity. Collective."""
    facts = inspect_rank(
        run_directory=run_directory,
        environ=os.environ,
        hostname=socket.gethostname(),
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=checkpoint_bytes,
    )
    identity = identity_from(facts)
    # The controller is asked once for all ranks; before MPI starts, since that runs other programs.
    if identity is not None and identity.rank == 0:
        facts["slurm"] = ask_slurm(os.environ)
    if identity is not None and identity.num_ranks > 1:
        return _report_together(facts, identity, backend=backend, timeout_s=timeout_s, as_json=as_json)
    if "error" not in facts["mpi"]:
        facts["mpi"].update(probe_mpi_alone(timeout_s=timeout_s))
    findings = merge_findings([facts])
    _show(findings, [facts], as_json=as_json)
    return worst_severity(findings)


def _report_together(
    facts: dict[str, Any], identity: RankIdentity, *, backend: str, timeout_s: float, as_json: bool
) -> Severity:
    """Gathers the facts of all ranks, from which rank 0 prints one report. Collective.

    Returns the same severity on every rank. If the ranks cannot connect, this rank prints its own findings and returns
    PROBLEM. If MPI cannot start and ends the process, the findings are printed too, but the exit code is MPI's.
    """
    silence = f"the ranks did not connect (MPI may have printed more): {cure_for(identity.launcher)}"
    try:
        with ExitNotice(_words(facts, identity, silence), timeout_s=timeout_s):
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
            facts["clock"] = sample_clock(world)
            look_for_rank_0s_file(world, facts, checks=identity.local_rank in (None, 0))
            facts_by_rank = all_gather_json(world, facts)
            findings = merge_findings(facts_by_rank)
            if world.rank == 0:
                _show(findings, facts_by_rank, as_json=as_json)
            # The launcher ends all ranks when one exits with an error: wait until rank 0 has printed the report.
            world.barrier()
            world.close()
    except HpctrainError as error:
        if "error" not in facts["mpi"] and "mpi4py.MPI" in sys.modules:
            facts["mpi"].update(probe_started_mpi())
        print(_words(facts, identity, str(error)), file=sys.stderr, flush=True)
        return Severity.PROBLEM
    return worst_severity(findings)


def _words(facts: Mapping[str, Any], identity: RankIdentity, failure: str) -> str:
    """Returns this rank's own report, for the case that the ranks cannot connect. Each line begins with the rank.

    failure: why the ranks could not connect.
    """
    findings = judge_rank({**facts, "communication": {"error": failure}})
    prefix = f"hpctrain doctor: rank {identity.rank} on {identity.node_name}:"
    return "\n".join(
        f"{prefix} {finding.level.value}: {finding.topic}: {finding.text}"
        + (f" -> {finding.remedy}" if finding.remedy else "")
        for finding in findings
    )


def _show(findings: Sequence[Finding], facts_by_rank: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        report = {
            "level": worst_severity(list(findings)).value,
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
    # Open MPI gives ranks a pseudo-terminal even if its own output goes to a file.
    plain = len(facts_by_rank) > 1 or not sys.stdout.isatty()
    console = Console(
        width=_PLAIN_WIDTH if plain else None, force_terminal=False if plain else None, highlight=False
    )
    console.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Severity}
    counted = [_counted(count, level.value) for level, count in counts.items() if level is not Severity.OK]
    console.print(f"{counts[Severity.OK]} ok, {', '.join(counted)}; {_counted(len(facts_by_rank), 'rank')}")
    sys.stdout.flush()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
