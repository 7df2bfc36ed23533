"""Measures all nodes before training, prints what is slow, and writes `probe.json`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.comm import on_rank_0
from hpctrain.errors import LaunchError
from hpctrain.run.session import Session
from hpctrain.stragglers import (
    Links,
    ProbeFinding,
    Quantity,
    RankSpeeds,
    document,
    measure_links,
    measure_ranks,
    slow_links,
    slow_speeds,
)
from hpctrain.telemetry import in_words, tell, write_json

PROBE_FILE = "probe.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The result of the measurement, the same on every rank.

    Attributes:
        links: The measured links between nodes; None on one node.
        ranks: The measured memory and arithmetic speeds of the ranks.
        findings: What is slower than elsewhere.
        document: The content of `probe.json`.
    """

    links: Links | None
    ranks: RankSpeeds
    findings: tuple[ProbeFinding, ...]
    document: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.ranks.seconds + (self.links.seconds if self.links is not None else 0.0)


def probe_nodes(session: Session) -> Probe:
    """Measures the links between all pairs of nodes, and each rank's memory and arithmetic. Collective."""
    topology = session.topology
    ranks = measure_ranks(session.world, device=session.device)
    links = measure_links(session.world, topology, thorough=True)
    findings = [
        *slow_speeds(ranks.flop_per_s, quantity=Quantity.ARITHMETIC, topology=topology),
        *slow_speeds(ranks.memory_bytes_per_s, quantity=Quantity.MEMORY, topology=topology),
    ]
    if links is not None:
        findings += slow_links(links.nodes, links.pairs, topology=topology)
    about = {
        "time": time.time(), "step": 0, "seconds": {"links": links.seconds if links else 0.0, "ranks": ranks.seconds}
    }  # fmt: skip
    return Probe(
        links=links, ranks=ranks, findings=tuple(findings),
        document=document(
            topology=topology, links=links.nodes if links is not None else None, ranks=ranks, findings=findings,
            about=about,
        ),
    )  # fmt: skip


def probe_before_training(session: Session, *, directory: Path) -> Probe:
    """Measures the nodes, prints the result, and writes it into the run directory. Collective."""
    found = probe_nodes(session)
    if session.rank == 0:
        slow = "nothing is slow" if not found.findings else f"{len(found.findings)} findings"
        tell(f"probe of the nodes, {in_words(found.seconds)}: {slow}; {directory / PROBE_FILE}")
        for finding in found.findings:
            tell(f"probe: {finding.describe()}")
    on_rank_0(session.world, lambda: write_json(directory / PROBE_FILE, found.document), os_error=LaunchError)
    return found
