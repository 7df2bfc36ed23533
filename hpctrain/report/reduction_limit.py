"""How far the reductions of a run are from what its links and memory allow. Pure.

An all-reduce of n bytes over W members, each of which sends at a rate B, takes at least 2 (W-1)/W n / B (Patarasuk and
Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, theorem 1). Here the members are the nodes, which send through their links
what the wire format makes of the gradients, and within a node its ranks, through memory. The two levels may overlap,
so the slower one is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.bench import bound_bytes
from hpctrain.report.run_data import RunData
from hpctrain.report.table import Row, Table, Value

_ELEMENT_BYTES = 4
_HOW_TO_KNOW = "stragglers.probe = 'start' or reduction.algorithm = 'auto' measures it in a run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes, or the ranks of a node. sent_bytes: that each of the `members` must send in a step; None where the
    wire format's size depends on the gradients. bytes_per_s: None if it is not known. source: what it is known from."""

    members: int
    sent_bytes: float | None
    bytes_per_s: float | None
    source: str

    @property
    def least_s(self) -> float | None:
        if self.sent_bytes is None or self.bytes_per_s is None:
            return None
        return self.sent_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionLimit:
    """Of a run on several ranks. gradient_bytes: of a rank, uncast; None if the run has not recorded its buckets.
    nodes, ranks: the levels; None with a single member. hidden_s, exposed_s: seconds of reduction in a step, mean over
    the ranks, without waiting for slower ranks once a rank has nothing else to do; None before it was measured."""

    gradient_bytes: int | None
    wire: str
    nodes: Level | None
    ranks: Level | None
    hidden_s: float | None
    exposed_s: float | None

    @property
    def least_s(self) -> float | None:
        """The time of the slower level, of those that are known."""
        found = [
            level.least_s
            for level in (self.nodes, self.ranks)
            if level is not None and level.least_s is not None
        ]
        return max(found, default=None)

    @property
    def measured_s(self) -> float | None:
        return None if self.hidden_s is None or self.exposed_s is None else self.hidden_s + self.exposed_s

    @property
    def times_least(self) -> float | None:
        """The measured time divided by the least; below 1 where caches are faster than memory."""
        return self.measured_s / self.least_s if self.measured_s is not None and self.least_s else None


def reduction_limit(run: RunData, *, link_bytes_per_s: float | None = None) -> ReductionLimit | None:
    """Returns what a run's reductions took and must take at least; None on one rank.

    link_bytes_per_s: of a node, one direction; None: what the run has measured.
    """
    if run.num_ranks == 1:
        return None
    per_node = max((len(ranks) for ranks in run.environment["ranks_by_node"]), default=1)
    wire = str(run.environment.get("wire", ""))
    # Two-level algorithms sum float32 in the node's memory, the others send encoded messages there too.
    within = "fp32" if "hierarchical" in str(run.environment.get("algorithm", "")) else wire
    link, link_source = (link_bytes_per_s, "--link") if link_bytes_per_s is not None else _link(run)
    memory, memory_source = _memory(run)
    parts = run.efficiency.parts if run.efficiency is not None else {}
    return ReductionLimit(
        gradient_bytes=run.gradient_bytes,
        wire=wire,
        nodes=_level(run, run.num_nodes, wire=wire, bytes_per_s=link, source=link_source),
        ranks=_level(run, per_node, wire=within, bytes_per_s=memory, source=memory_source),
        hidden_s=parts.get("hidden_reduction"),
        exposed_s=parts.get("exposed_reduction"),
    )


def reduction_table(runs: Sequence[RunData], limits: Sequence[ReductionLimit | None]) -> Table | None:
    """Returns bytes, rates and times of the runs' reductions; None if no run has several ranks."""
    measured = [(run, limit) for run, limit in zip(runs, limits, strict=True) if limit is not None]
    if not measured:
        return None
    rows: list[Row] = []

    def add(name: str, value: Callable[[ReductionLimit], Value], *, format: str = "", unit: str = "") -> None:
        values = [value(limit) for _, limit in measured]
        if any(each is not None for each in values):
            rows.append(Row(name=name, values=values, format=format, unit=unit))

    def add_level(of: Callable[[ReductionLimit], Level | None], *, sends: str, rate: str, least: str) -> None:
        def part(value: Callable[[Level], float | None], scale: float) -> Callable[[ReductionLimit], Value]:
            return lambda limit: _scaled(None if (level := of(limit)) is None else value(level), scale)

        add(sends, part(lambda level: level.sent_bytes, 1e-6), format=",.3f", unit="MB")
        add(rate, part(lambda level: level.bytes_per_s, 1e-6), format=",.0f", unit="MB/s")
        add("known from", lambda limit: (level.source or None) if (level := of(limit)) is not None else None)
        add(least, part(lambda level: level.least_s, 1e3), format=",.3f", unit="ms")

    add("gradients of a rank", lambda limit: _scaled(limit.gradient_bytes, 1e-6), format=",.3f", unit="MB")
    add("on the wire", lambda limit: limit.wire or None)
    add_level(
        lambda limit: limit.nodes, sends="each node sends at least", rate="rate of a node's link",
        least="so between nodes at least",
    )  # fmt: skip
    add_level(
        lambda limit: limit.ranks, sends="each rank passes to its node's at least", rate="rate of a rank in its node",
        least="so within a node at least",
    )  # fmt: skip
    add("measured: hidden", lambda limit: _scaled(limit.hidden_s, 1e3), format=",.3f", unit="ms")
    add("measured: exposed", lambda limit: _scaled(limit.exposed_s, 1e3), format=",.3f", unit="ms")
    add("measured together", lambda limit: _scaled(limit.measured_s, 1e3), format=",.3f", unit="ms")
    add("measured / least", lambda limit: limit.times_least, format=",.1f")
    return Table(
        name="reduction", title="Reduction against the limit of links and memory",
        columns=[run.label for run, _ in measured], rows=rows,
        note="In a step. Least: 2 (W-1)/W x bytes / rate over W nodes, or ranks of a node; the larger one counts. "
        + _unknown([limit for _, limit in measured]),
    )  # fmt: skip


def _unknown(limits: Sequence[ReductionLimit]) -> str:
    """Returns which figures are missing, and how to get them."""
    found = []
    if any(limit.gradient_bytes is None for limit in limits):
        found.append("Where a run has recorded no buckets, its bytes are not known.")
    if any(limit.nodes is not None and limit.nodes.bytes_per_s is None for limit in limits):
        found.append(f"The rate of a link is not known: give --link, as 100gbit; {_HOW_TO_KNOW}.")
    if any(limit.ranks is not None and limit.ranks.bytes_per_s is None for limit in limits):
        found.append(f"The rate within a node is not known: {_HOW_TO_KNOW}.")
    if any(
        limit.nodes is not None and limit.nodes.sent_bytes is None and limit.gradient_bytes
        for limit in limits
    ):
        found.append("The bytes of a sparse or low-rank wire format depend on the gradients.")
    return " ".join(found)


def _level(run: RunData, members: int, *, wire: str, bytes_per_s: float | None, source: str) -> Level | None:
    if members < 2:
        return None
    sent = None
    if run.gradient_bytes is not None:
        sent = bound_bytes(run.gradient_bytes // _ELEMENT_BYTES, wire=wire, num_nodes=members)
    return Level(members=members, sent_bytes=sent, bytes_per_s=bytes_per_s, source=source)


def _link(run: RunData) -> tuple[float | None, str]:
    """Returns the rate of the slowest node's link."""
    rates = [
        float(node["bytes_per_s"]) for node in (run.probe or {}).get("nodes", ()) if node.get("bytes_per_s")
    ]
    if rates:
        return min(rates), "probe.json, slowest node"
    if run.probed_link is not None:
        return run.probed_link, "probe during training, slowest node"
    return _calibrated(run, "node")


def _memory(run: RunData) -> tuple[float | None, str]:
    """Returns the rate of a rank within its node: its share of the memory's, on the slowest node."""
    nodes = zip((run.probe or {}).get("nodes", ()), run.environment["ranks_by_node"], strict=False)
    rates = [float(node["memory_bytes_per_s"]) / len(ranks) for node, ranks in nodes if ranks]
    return (min(rates), "probe.json, a rank's share of memory") if rates else _calibrated(run, "local")


def _calibrated(run: RunData, axis: str) -> tuple[float | None, str]:
    """Returns what `reduction.algorithm = "auto"` has measured on the same ranks of the same nodes."""
    for entry in reversed(run.calibrations):
        if entry["key"].get("ranks_by_node") == run.environment["ranks_by_node"]:
            for level in entry["found"]["levels"]:
                if level["axis"] == axis:
                    return float(level["bytes_per_s"]), "reduction.json, an all-reduce"
    return None, ""


def _scaled(value: float | None, factor: float) -> Value:
    return None if value is None else value * factor
