"""Conclusions from the measurements of a run: sentences, each with a number and the source of the number. Pure.

Why one run is slower per rank than a reference run follows from an identity. The ratio of their samples/s per rank is a
product of five factors: computation scaling, and the ratios of load balance, serialisation, transfer and share of
computing. If the product is e, a factor f explains the part ln f / ln e of the loss. The parts of all factors add up
to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.bench import bound_bytes
from hpctrain.reduce import ELEMENT_BYTES, find_wire, share_of_float32
from hpctrain.report.run_data import RunData
from hpctrain.report.tables import Row, Table, Value
from hpctrain.scaling import Efficiency, against, own_times
from hpctrain.supervise import effective_time

# Times of the ranks of a split model by pipeline stage and by index in the tensor group.
# Pure.


# The names of a rank's indices in environment.json, and their singular names.
_AXES = {"pipeline": "stage", "tensor": "tensor rank"}
_PARTS = ("compute", "bubble", "exposed_sync", "input")


def places(run: RunData, axis: str) -> dict[int, list[int]]:
    """Returns, for each index on the axis `pipeline` or `tensor`, the ranks at this index.

    Returns {} if the axis has fewer than two indices.
    """
    found: dict[int, list[int]] = {}
    for rank, entry in enumerate(run.environment["ranks"]):
        if axis in entry:
            found.setdefault(int(entry[axis]), []).append(rank)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def stage_seconds(run: RunData) -> list[float]:
    """Returns the seconds per step that each pipeline stage computes, as the mean over its ranks and the steps.

    Returns [] if the run is not a pipeline, or if the times of all ranks are not known.
    """
    if run.times is None:
        return []
    return [float(run.times.seconds["compute"][ranks].mean()) for ranks in places(run, "pipeline").values()]


def by_axis(run: RunData) -> Table | None:
    """Returns the times of each pipeline stage and of each index in a tensor group.

    Returns None if the run has neither a pipeline nor tensor groups, or if the times are unknown.
    """
    if run.times is None:
        return None
    rows = [
        Row(
            name=f"{called} {place}",
            values=[len(ranks), *(1e3 * float(run.times.seconds[part][ranks].mean()) for part in _PARTS)],
            format=",.1f",
        )
        for axis, called in _AXES.items()
        for place, ranks in places(run, axis).items()
    ]
    if not rows:
        return None
    return Table(
        name=f"axes-{run.label}", title=f"Positions of {run.label} in the efficiency model", rows=rows, head="place",
        columns=["ranks", *(f"{part.replace('_', ' ')}, ms" for part in _PARTS)],
        note="Time per step, mean over ranks and steps. Bubble: the stages of a rank wait for other stages.",
    )  # fmt: skip


# Compares the reductions of a run with the bound that its links and memory allow. Pure.
#
# An all-reduce of n bytes over W members, each of which sends at a rate B, takes at least 2 (W-1)/W n / B
# (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, theorem 1). Here the members are the nodes,
# which send through their links what the wire format makes of the gradients, and within a node its ranks,
# through memory. The two levels may overlap, so the slower one is the limit.


_HOW_TO_KNOW = "stragglers.probe = 'start' or reduction.algorithm = 'auto' measures it in a run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a reduction: between nodes, or between the ranks of a node.

    Attributes:
        members: The number of nodes, or of ranks of a node.
        sent_bytes: The bytes that each member must send per step; None if the size of the wire format depends on the
            gradients, or if the run has not recorded its buckets.
        bytes_per_s: The rate at which a member can send; None if unknown.
        source: Where `bytes_per_s` was measured.
    """

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
    """The measured time of a run's reductions and its lower bound, for a run on several ranks.

    Attributes:
        gradient_bytes: The bytes of one rank's gradients before encoding; None if the run has not recorded its buckets.
        nodes: The level between nodes; None if there is one node.
        ranks: The level within a node; None if there is one rank per node.
        hidden_s: The seconds per step in which a rank computes while a reduction runs, as the mean over the ranks; None
            if not measured.
        exposed_s: The seconds per step in which a rank only waits for a reduction, without the wait for slower ranks,
            as the mean over the ranks; None if not measured.
    """

    gradient_bytes: int | None
    wire: str
    nodes: Level | None
    ranks: Level | None
    hidden_s: float | None
    exposed_s: float | None

    @property
    def least_s(self) -> float | None:
        """The lower bound in seconds: the longest known time of a level; None if no time is known."""
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
        """The measured time divided by the lower bound. Can be below 1, since caches are faster than memory."""
        return self.measured_s / self.least_s if self.measured_s is not None and self.least_s else None


def reduction_limit(run: RunData, *, link_bytes_per_s: float | None = None) -> ReductionLimit | None:
    """Returns the time of a run's reductions and its lower bound; None if the run has only one rank.

    link_bytes_per_s: the rate of a node's link in one direction; None: the rate that the run has measured.
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
        least="so the time between nodes is at least",
    )  # fmt: skip
    add_level(
        lambda limit: limit.ranks, sends="each rank sends within its node at least", rate="rate per rank within "
            "its node",
        least="so the time within a node is at least",
    )  # fmt: skip
    add("measured: hidden", lambda limit: _scaled(limit.hidden_s, 1e3), format=",.3f", unit="ms")
    add("measured: exposed", lambda limit: _scaled(limit.exposed_s, 1e3), format=",.3f", unit="ms")
    add("measured together", lambda limit: _scaled(limit.measured_s, 1e3), format=",.3f", unit="ms")
    add("measured / least", lambda limit: limit.times_least, format=",.1f")
    return Table(
        name="reduction", title="Reduction against the limit of links and memory",
        columns=[run.label for run, _ in measured], rows=rows,
        note="Per step. Least: 2 (W-1)/W x bytes / rate over W nodes, or W ranks of a node; the larger time counts. "
        + _unknown([limit for _, limit in measured]),
    )  # fmt: skip


def _unknown(limits: Sequence[ReductionLimit]) -> str:
    """Returns a text that says which numbers are missing, and how to get them."""
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
        sent = bound_bytes(run.gradient_bytes // ELEMENT_BYTES, wire=wire, num_nodes=members)
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
    """Returns the rate of a rank within its node: its share of the memory's rate, on the slowest node."""
    nodes = zip((run.probe or {}).get("nodes", ()), run.environment["ranks_by_node"], strict=False)
    rates = [float(node["memory_bytes_per_s"]) / len(ranks) for node, ranks in nodes if ranks]
    return (
        (min(rates), "probe.json, a rank's share of the memory bandwidth")
        if rates
        else _calibrated(run, "local")
    )


def _calibrated(run: RunData, axis: str) -> tuple[float | None, str]:
    """Returns the rate that `reduction.algorithm = "auto"` has measured on the same ranks of the same nodes."""
    for entry in reversed(run.calibrations):
        if entry["key"].get("ranks_by_node") == run.environment["ranks_by_node"]:
            for level in entry["found"]["levels"]:
                if level["axis"] == axis:
                    return float(level["bytes_per_s"]), "reduction.json, an all-reduce"
    return None, ""


def _scaled(value: float | None, factor: float) -> Value:
    return None if value is None else value * factor


# What the measurements of a run mean, in sentences that each name a number and where it was measured.


# Parts of a step below this share are not worth a sentence.
_WORTH_NAMING = 0.03
# POP's experience: parallel efficiencies of at least 80 % are acceptable.
ACCEPTABLE = 0.8
# Reductions that take at least this many times what their bytes need are worth a look.
_FAR_FROM_LIMIT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A conclusion. `source` is the measurement that supports the conclusion. A larger `weight` comes first."""

    text: str
    source: str
    weight: float
    kind: Literal["good", "note", "problem"] = "note"


def conclude(
    run: RunData, *, reference: RunData | None = None, limit: ReductionLimit | None = None
) -> list[Conclusion]:
    """Returns the conclusions from a run, the most important first.

    reference: the run with which `run` is compared. limit: the lower bound on the time of the reductions of `run`.
    """
    found: list[Conclusion] = [*_of_attempts(run), *_of_incidents(run)]
    if run.efficiency is not None:
        found += _of_parts(run, run.efficiency)
        if limit is not None:
            found += _of_limit(limit, step_s=run.efficiency.step_s)
        if reference is not None and reference.efficiency is not None and reference is not run:
            found += _of_scaling(run, run.efficiency, reference=reference, base=reference.efficiency)
    found += _of_nodes(run)
    return sorted(found, key=lambda conclusion: -conclusion.weight)


def factors_of_loss(run: Efficiency, *, reference: Efficiency) -> dict[str, float]:
    """Returns the factor by which each cause changes the samples/s per rank, relative to the reference.

    The product of the factors is the whole change.
    """
    ours, theirs = run.factors, reference.factors
    return {
        "computation scaling": against(run, reference=reference).computation,
        "load balance": _ratio(ours.load_balance, theirs.load_balance),
        "serialisation": _ratio(ours.serialisation, theirs.serialisation),
        "transfer": _ratio(ours.transfer, theirs.transfer),
        "share of computing": _ratio(ours.computing, theirs.computing),
    }


_MEANS = {
    "computation scaling": "computing takes longer for each sample",
    "load balance": "some ranks have more to do than others",
    "serialisation": "in each step another rank is the slowest, or stages of a pipeline wait for each other",
    "transfer": "reductions take time that no computing hides",
    "share of computing": "ranks spend time on input, checkpoints and other work",
}


def _of_scaling(
    run: RunData, ours: Efficiency, *, reference: RunData, base: Efficiency
) -> Iterator[Conclusion]:
    speed = against(ours, reference=base).relative_speed
    factors = factors_of_loss(ours, reference=base)
    cause, factor = min(factors.items(), key=lambda item: item[1])
    text = f"{_ranks(run)} reach {speed:.0%} of the samples/s of each rank of {reference.label} ({_ranks(reference)})"
    kind: Literal["good", "note", "problem"] = "good" if speed >= ACCEPTABLE else "problem"
    if speed < 0.97 and factor < 1:
        part = math.log(factor) / math.log(speed)
        text += (
            f"; the largest cause is {cause} ({factor:.2f}, {min(part, 1):.0%} of the loss): {_MEANS[cause]}"
        )
        if cause == "computation scaling" and run.shares_cores:
            text += ", since here the ranks of a node share cores"
    yield Conclusion(
        text=text + ".",
        source=f"records of both runs, {ours.steps} and {base.steps} steps",
        weight=3,
        kind=kind,
    )


def _of_stages(run: RunData) -> Iterator[Conclusion]:
    """Yields a conclusion on the pipeline stage that computes longest, if the other stages wait for it."""
    seconds = stage_seconds(run)
    if len(seconds) < 2:
        return
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    excess = seconds[longest] / (sum(seconds) / len(seconds)) - 1
    if excess >= _WORTH_NAMING:
        yield Conclusion(
            text=f"Stage {longest} (of 0 to {len(seconds) - 1}) computes {excess:.0%} longer than the mean stage, and "
            "the others wait for it: blocks are divided evenly, and what is before the first and after the last one "
            "adds to the first and last stage.",
            source=f"compute of the ranks of each stage: {', '.join(f'{1e3 * each:.3g}' for each in seconds)} ms",
            weight=excess, kind="problem",
        )  # fmt: skip


def _of_parts(run: RunData, found: Efficiency) -> Iterator[Conclusion]:
    source = f"all ranks, {found.steps} steps of {1e3 * found.step_s:.3g} ms"
    share = {name: seconds / found.step_s for name, seconds in found.parts.items()} if found.step_s else {}
    parallel = found.factors.parallel
    if found.ranks > 1:
        yield Conclusion(
            text=f"Parallel efficiency is {parallel:.0%}: of the ranks' time, {1 - parallel:.0%} is waiting for each "
            "other or for the network.",
            source=source, weight=2, kind="good" if parallel >= ACCEPTABLE else "problem",
        )  # fmt: skip
    exposed = share.get("exposed_reduction", 0.0)
    if exposed >= _WORTH_NAMING:
        yield Conclusion(text=_reduction_text(run, exposed), source=source, weight=exposed, kind="problem")
    if (waiting := share.get("waiting", 0.0)) >= _WORTH_NAMING:
        yield Conclusion(
            text=_waiting_text(run, found, waiting), source=source, weight=waiting, kind="problem"
        )
    yield from _of_stages(run)
    for name, advice in (
        (
            "bubble",
            "more parallel.micro_batches or schedule = 'interleaved' (docs/guides/parallelism.md) shorten it",
        ),
        ("input", "data.workers and data.staging (docs/guides/data.md) move it out of the step"),
        ("checkpoint", "checkpoint.mode = 'async' or fewer saves shorten it"),
        ("evaluation", "fewer evaluations or data.evaluation_samples shorten it"),
        ("other", "a trace of some steps shows what it is (hpctrain trace)"),
    ):
        if share.get(name, 0.0) >= _WORTH_NAMING:
            gain = 1 / (1 - share[name])
            yield Conclusion(
                text=f"{share[name]:.0%} of the step is {name}; without it the run would be {gain:.2f} x as fast; "
                f"{advice}.",
                source=source, weight=share[name], kind="problem",
            )  # fmt: skip
    if run.shares_cores:
        yield Conclusion(
            text="The ranks of a node share cores, so that times here do not show what ranks with cores of their own "
            "would reach.",
            source="cores and threads in environment.json", weight=0.5,
        )  # fmt: skip


def _reduction_text(run: RunData, exposed: float) -> str:
    wire = str(run.environment.get("wire", ""))
    text = f"{exposed:.0%} of the step is exposed reduction"
    # Split layers and pipelines are summed in the gradients' dtype.
    sent, split = find_wire(wire), run.environment.get("algorithm") in ("torch.distributed", "pipeline")
    smaller = sent.smaller if sent is not None and not split else None
    if smaller is not None:
        left = (share_of_float32(smaller) or 1.0) / (share_of_float32(wire) or 1.0)
        gain = 1 / (1 - exposed * (1 - left))
        text += (
            f"; {smaller} on the wire instead of {wire} would give at most {gain:.2f} x, if the time depends on "
            "the bytes"
        )
    return text + "."


def _of_limit(limit: ReductionLimit, *, step_s: float) -> Iterator[Conclusion]:
    """Yields a conclusion on how far the reductions are from the lower bound, if time and bound are known."""
    times, measured_s, least_s = limit.times_least, limit.measured_s, limit.least_s
    if times is None or measured_s is None or least_s is None or not step_s:
        return
    levels = [level for level in (limit.nodes, limit.ranks) if level is not None]
    bound = max(levels, key=lambda level: level.least_s or 0)
    where = "between nodes" if bound is limit.nodes else "within a node"
    exposed = (limit.exposed_s or 0.0) / step_s
    yield Conclusion(
        text=f"A step's reductions take {1e3 * measured_s:.3g} ms, of which {1e3 * (limit.exposed_s or 0):.3g} ms are "
        f"exposed: {times:.1f} x the {1e3 * least_s:.3g} ms that {_bytes_at(bound)} need {where} at least.",
        source=f"efficiency of all ranks; rate: {bound.source}", weight=exposed,
        kind="problem" if times >= _FAR_FROM_LIMIT and exposed >= _WORTH_NAMING else "note",
    )  # fmt: skip


def _bytes_at(level: Level) -> str:
    return f"{(level.sent_bytes or 0) / 1e6:.3g} MB at {(level.bytes_per_s or 0) / 1e6:,.0f} MB/s"


def _waiting_text(run: RunData, found: Efficiency, waiting: float) -> str:
    factors = found.factors
    text = f"{waiting:.0%} of the step is waiting for slower ranks, "
    if factors.load_balance < factors.serialisation:
        text += f"mostly for the same ranks (load balance {factors.load_balance:.2f})"
        if run.times is not None:
            slowest = int(own_times(run.times).mean(axis=1).argmax())
            text += f": rank {slowest} on {run.environment['ranks'][slowest]['node']} needs the longest"
    else:
        text += f"in each step for a different rank (serialisation {factors.serialisation:.2f})"
    return text + "."


def _of_nodes(run: RunData) -> Iterator[Conclusion]:
    """Yields the advice on the number of nodes."""
    advice = run.advice
    if advice is None:
        return
    text = f"{advice.text[0].upper()}{advice.text[1:]}."
    now = advice.on(advice.nodes)
    source = f"model of the step, goal {advice.goal.value}"
    if now is not None:
        source += f", from a measured step of {1e3 * now.step_s:.3g} ms"
    yield Conclusion(text=text, source=source, weight=2.5 if advice.moves else 0.4)


def _of_attempts(run: RunData) -> Iterator[Conclusion]:
    ended = [attempt for attempt in run.attempts if attempt.ended is not None]
    if not ended:
        return
    share = effective_time(run.attempts).share
    causes = ", ".join(str(attempt.cause.value) for attempt in ended if attempt.cause is not None)
    yield Conclusion(
        text=f"{share:.0%} of the time of {len(ended)} attempts advanced the run (why they ended: {causes}).",
        source="attempts.jsonl", weight=4, kind="good" if share >= 0.9 else "problem",
    )  # fmt: skip


def _of_incidents(run: RunData) -> Iterator[Conclusion]:
    names = {
        "slow": "slow ranks, nodes or links were reported",
        "loss_jump": "steps were dropped because their loss jumped or was not finite",
        "roll_back": "roll-backs to a checkpoint",
        "out_of_memory": "times a rank ran out of memory",
        "damage": "damaged blocks of data were met",
    }
    for kind, what in names.items():
        count = sum(record["kind"] == kind for record in run.incidents)
        if count:
            yield Conclusion(
                text=f"{count} {what}.", source=f"records {kind} in metrics/", weight=1, kind="problem"
            )


def _ranks(run: RunData) -> str:
    ranks, nodes = run.num_ranks, run.num_nodes
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0
