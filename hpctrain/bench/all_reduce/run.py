"""Runs the all-reduce measurement on the ranks of a session and builds its JSON document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctrain.bench.all_reduce.link_rate import measure_link
from hpctrain.bench.all_reduce.measure import AllReduceAsked, AllReduceMeasured, measure_all_reduce
from hpctrain.bench.all_reduce.reducers import ReducersHere
from hpctrain.bench.document import document_head
from hpctrain.errors import UsageError
from hpctrain.run import Session, environment_record

SCHEMA = "hpctrain.bench.allreduce/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Rate of a node's link in one direction. source: `given` or `measured`."""

    bytes_per_s: float
    source: str

    def describe(self) -> str:
        return f"{8 * self.bytes_per_s / 1e6:,.0f} Mbit/s ({self.source})"


def parse_link(text: str | None) -> float | None:
    """Parses `--link-mbit`. Returns bytes/s; None for `measure` and if not given. Raises UsageError."""
    if text is None or text == "measure":
        return None
    try:
        mbit = float(text)
    except ValueError:
        mbit = 0.0
    if not 0 < mbit < 1e9:
        raise UsageError(f"--link-mbit {text}: give the rate in Mbit/s, or `measure`")
    return mbit * 1e6 / 8


def find_link(text: str | None, *, session: Session) -> Link | None:
    """Returns the link rate that was given, or measures it; None if it is not requested or cannot be measured.

    Collective.
    """
    given = parse_link(text)
    if given is not None:
        return Link(bytes_per_s=given, source="given")
    if text is None:
        return None
    transport = session.world.transport(session.topology)
    if transport is None:
        session.note(
            f"the link is not measured: the backend {session.world.backend} has no point-to-point messages here"
        )
        return None
    try:
        found = measure_link(transport, comm=session.world)
    finally:
        transport.close()
    if found is None:
        session.note("the link is not measured: there is one node")
        return None
    return Link(bytes_per_s=found, source="measured")


def all_reduce_on(
    session: Session,
    asked: AllReduceAsked,
    *,
    reducers: ReducersHere,
    link: Link | None,
    progress: Callable[[float], None],
) -> AllReduceMeasured:
    """Runs `measure_all_reduce` with the reducers of `session`. Collective."""
    return measure_all_reduce(
        asked,
        reducers,
        comm=session.world,
        topology=session.topology,
        device=session.device,
        link_bytes_per_s=None if link is None else link.bytes_per_s,
        progress=progress,
        runs=lambda algorithm, wire, num_bytes: reducers.runs(algorithm, wire, num_bytes=num_bytes),
    )


def all_reduce_document(
    session: Session,
    asked: AllReduceAsked,
    found: AllReduceMeasured,
    *,
    reducers: ReducersHere,
    link: Link | None,
    commit: str | None,
) -> dict[str, Any]:
    """JSON document of `--json`; docs/guides/benchmarks.md describes its fields. Collective; rank 0's is written."""
    environment = environment_record(session, commit=commit)
    return {
        **document_head(SCHEMA, commit=commit),
        "topology": environment["topology"],
        "backend": environment["backend"],
        "environment": environment,
        "settings": {
            "sizes_bytes": list(asked.sizes_bytes),
            "algorithms": list(asked.algorithms),
            "wires": list(asked.wires),
            "repeats": asked.repeats,
            "warmup": asked.warmup,
            "in_flight": asked.in_flight,
            "seed": asked.seed,
        },
        "link": None if link is None else {"bytes_per_s": link.bytes_per_s, "source": link.source},
        "calibrations": [
            {"algorithm": algorithm, "wire": wire, **record}
            for (algorithm, wire), record in reducers.calibrations.items()
        ],
        "notes": found.notes,
        "cells": [row.as_json() for row in found.rows],
    }
