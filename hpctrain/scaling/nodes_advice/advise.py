"""Advice on the number of nodes of a run: one conclusion, and the predictions behind it. Pure functions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.scaling.nodes_advice.predict_nodes import MeasuredJob, NodesModel, NodesPrediction
from hpctrain.telemetry import in_words

# Without limits, up to this many times the present nodes: farther away, the model's errors leave everything open.
MOST_TIMES = 4
MOST_CANDIDATES = 16
# Of two numbers of nodes that differ by less than this in what the goal counts, the smaller one is named.
_SAME = 0.02


class ScalingGoal(str, Enum):
    """What a change of the number of nodes is to lower. The values are those of the recipe's `scaling.goal`."""

    TIME = "time"
    NODE_HOURS = "node-hours"
    ENERGY = "energy"
    BALANCE = "balance"  # the time times the node-hours


_COUNTED = {
    ScalingGoal.TIME: "the time", ScalingGoal.NODE_HOURS: "the node-hours", ScalingGoal.ENERGY: "the energy",
    ScalingGoal.BALANCE: "the time times the node-hours",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAdvice:
    """Whether a run would gain by another number of nodes.

    Attributes:
        text: The conclusion in one sentence, without a full stop.
        nodes: The number of nodes of the run.
        advised: The number of nodes that is advised; `nodes` if the run should stay.
        goal: What the advice is to lower.
        predictions: The rest of the run on each number of nodes that was looked at, ascending; also on the present one.
        missing: What would have to be known to say more; "" if nothing is missing.
        basis: What the predictions assume of computing and of the link, and where it comes from, as text.
    """

    text: str
    nodes: int
    advised: int
    goal: ScalingGoal
    predictions: tuple[NodesPrediction, ...] = ()
    missing: str = ""
    basis: str = ""

    @property
    def moves(self) -> bool:
        return self.advised != self.nodes

    def on(self, nodes: int) -> NodesPrediction | None:
        """Returns the prediction for a number of nodes; None if this number was not looked at."""
        return next((one for one in self.predictions if one.nodes == nodes), None)

    def document(self) -> dict[str, Any]:
        """Returns the fields of a record `scaling`, as docs/metrics.md describes them."""
        return {
            "text": self.text, "nodes": self.nodes, "advised_nodes": self.advised, "goal": self.goal.value,
            "missing": self.missing, "basis": self.basis, "predictions": [asdict(one) for one in self.predictions],
        }  # fmt: skip


def no_advice(error: UsageError, *, nodes: int, goal: ScalingGoal) -> NodesAdvice:
    """Returns the advice of a run about which nothing can be said. error: the reason."""
    return NodesAdvice(
        text=f"no advice on the number of nodes: {error}",
        nodes=nodes,
        advised=nodes,
        goal=goal,
        missing=str(error),
    )


def advise_nodes(
    job: MeasuredJob, *, goal: ScalingGoal = ScalingGoal.BALANCE, least_gain: float = 0.0
) -> NodesAdvice:
    """Returns whether the rest of the run would gain by another number of nodes.

    A number of nodes is advised only if it lowers what `goal` counts by more than `least_gain`, a share, even at the
    unfavourable end of its 90 % interval. Of the numbers that do, the best is advised, or a smaller one that is less
    than 2 % worse. `balance` counts the time times the node-hours: a doubling of the nodes lowers it if the time falls
    below 0.71 of the time now, a parallel efficiency of more than 71 %.

    Raises UsageError if the goal is the energy and no energy was measured.
    """
    if goal is ScalingGoal.ENERGY and job.watts is None:
        raise UsageError("no energy was measured: choose another goal, or see docs/guides/tracking.md")
    if job.steps_left < 1:
        raise UsageError("the run has no steps left")
    numbers, model = candidate_nodes(job), NodesModel(job)
    found = {nodes: model.predict(nodes) for nodes in numbers if not model.why_not(nodes)}
    now = found[job.nodes]
    others = [one for one in found.values() if one is not now]
    missing = next((why for nodes in numbers if (why := model.why_not(nodes))), "")
    present = _counted(goal, now)[0]
    certain = [one for one in others if _counted(goal, one)[1] < present * (1 - least_gain)]
    advised = now
    if certain:
        best = min(_counted(goal, one)[0] for one in certain)
        advised = next(
            one for one in certain if _counted(goal, one)[0] <= best * (1 + max(_SAME, least_gain))
        )
    if advised is not now:
        text = _change_text(advised, now)
    else:
        text = _stay_text(job, others, now, goal=goal, least_gain=least_gain, missing=missing)
    return NodesAdvice(
        text=text, nodes=job.nodes, advised=advised.nodes, goal=goal,
        predictions=tuple(found[nodes] for nodes in sorted(found)), missing=missing, basis=_basis(job),
    )  # fmt: skip


def candidate_nodes(job: MeasuredJob) -> list[int]:
    """Returns the numbers of nodes to look at, ascending, the present one included.

    These are halves and doubles of the present number, the numbers whose ranks divide the global batch, and the limits,
    within the limits of the recipe; without limits from 1 to `MOST_TIMES` times the present number. If there are more
    than `MOST_CANDIDATES`, those whose ratio to the present number is farthest from 1 are left out.
    """
    least = job.least_nodes or 1
    fits = max(1, job.global_batch // job.ranks_per_node)
    most = min(job.most_nodes or MOST_TIMES * job.nodes, fits)
    numbers = {n for n in range(least, most + 1) if job.global_batch % (n * job.ranks_per_node) == 0}
    nodes = job.nodes
    while nodes > 1:
        nodes //= 2
        numbers.add(nodes)
    numbers |= {job.nodes * 2**k for k in range(1, max(1, most).bit_length() + 1)} | {least, most}
    inside = sorted(
        (n for n in numbers if least <= n <= most and n != job.nodes), key=lambda n: _distance(n, job)
    )
    return sorted([job.nodes, *inside[: MOST_CANDIDATES - 1]])


def _distance(nodes: int, job: MeasuredJob) -> float:
    return abs(math.log(nodes / job.nodes))


def _counted(goal: ScalingGoal, one: NodesPrediction) -> tuple[float, float, float]:
    """Returns what the goal counts: as predicted, and at the unfavourable and the favourable end of the interval."""
    times = (one.time_s, one.time_high_s, one.time_low_s)
    if goal is ScalingGoal.TIME:
        return times
    # The energy too is proportional to nodes times time: the power per node is taken to be that of the present nodes.
    power = 2 if goal is ScalingGoal.BALANCE else 1
    expected, high, low = (one.nodes * seconds**power for seconds in times)
    return expected, high, low


def _change_text(to: NodesPrediction, now: NodesPrediction) -> str:
    nodes = _nodes(to.nodes)
    interval = f"90% interval of the time: {_interval(to, now)}"
    energy = ""
    if to.energy_j is not None and now.energy_j is not None:
        energy = f", {_kwh(to.energy_j)} instead of {_kwh(now.energy_j)} kWh"
    if to.nodes > now.nodes:
        return (
            f"{nodes} instead of {now.nodes} would finish in {in_words(to.time_s)} instead of {in_words(now.time_s)}, "
            f"for {_hours(to.node_hours)} instead of {_hours(now.node_hours)} node-hours{energy} ({interval})"
        )
    longer = to.time_s / now.time_s - 1
    time = (
        f"{longer:.0%} longer"
        if longer >= 0.005
        else f"{-longer:.0%} less time"
        if longer <= -0.005
        else "as long"
    )
    saved = 1 - to.node_hours / now.node_hours
    return (
        f"fewer nodes: {to.nodes} instead of {now.nodes} would take {time} and save {saved:.0%} of the node-hours"
        f"{energy} ({interval})"
    )


def _stay_text(
    job: MeasuredJob, others: list[NodesPrediction], now: NodesPrediction, *, goal: ScalingGoal, least_gain: float,
    missing: str,
) -> str:  # fmt: skip
    if not others:
        return f"no advice on the number of nodes: {missing or 'the limits leave no other number of nodes'}"
    numbers = sorted([now.nodes, *(one.nodes for one in others)])
    within = f"{numbers[0]} to {numbers[-1]}"
    best = min(others, key=lambda one: _counted(goal, one)[0])
    present = _counted(goal, now)[0]
    gain = 1 - _counted(goal, best)[0] / present
    tail = f"; about more nodes nothing can be said: {missing}" if missing else ""
    if gain > least_gain:
        return (
            f"stays on {_nodes(now.nodes)}: {best.nodes} might lower {_COUNTED[goal]} by {gain:.0%}, which the model's "
            f"error leaves open (90% interval of the time: {_interval(best, now)})" + tail
        )
    if all(_counted(goal, one)[2] > present * (1 - least_gain) for one in others):
        wanted = f" by more than {least_gain:.0%}" if least_gain else ""
        return (
            f"stays on {_nodes(now.nodes)}: no other number from {within} lowers {_COUNTED[goal]}{wanted}"
            + tail
        )
    return (
        f"stays on {_nodes(now.nodes)}: no other number from {within} changes {_COUNTED[goal]} by more than the "
        "model's error" + tail
    )


def _basis(job: MeasuredJob) -> str:
    fixed, link = job.fixed, job.link
    text = f"{fixed.value:.0%} of computing does not depend on the samples ({fixed.source})"
    if link is not None:
        text += f"; rate of a node's link {link.bytes_per_s / 1e6:,.0f} MB/s ({link.source})"
    return text


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _interval(to: NodesPrediction, now: NodesPrediction) -> str:
    low, high = (seconds / now.time_s for seconds in (to.time_low_s, to.time_high_s))
    return f"{low:.2f} to {high:.2f} times the present one"


def _hours(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _kwh(joules: float) -> str:
    return _hours(joules / 3.6e6)
