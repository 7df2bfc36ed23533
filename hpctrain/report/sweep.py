"""What a scaling sweep says: a table, and conclusions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.report.conclusions import ACCEPTABLE, Conclusion
from hpctrain.report.table import Row, Table

if TYPE_CHECKING:
    from hpctrain.bench import ScalingDocument


def sweep_table(sweep: ScalingDocument) -> Table:
    """Returns what a sweep has measured, a line for each number of ranks."""
    rows = [
        Row(
            name=f"{size.ranks}",
            values=[
                size.nodes,
                f"{size.samples_per_s['median']:,.0f}",
                f"{1e3 * size.step_s['median']:,.2f}",
                _percent(size.efficiency.get("value")),
                _percent(size.efficiency.get("low")),
                _percent(size.efficiency.get("high")),
                _percent(
                    size.seconds["exposed_sync"] / size.seconds["step"] if size.seconds.get("step") else None
                ),
                size.repeats,
            ],
        )
        for size in sweep.sizes
    ]
    chosen = (sweep.fits or {}).get("chosen")
    law = f" Fitted: {chosen} ({sweep.fits['why']})." if sweep.fits and chosen else ""
    return Table(
        name="scaling", title=f"Scaling, {sweep.settings.mode}", head="ranks",
        columns=["nodes", "samples/s", "ms a step", "efficiency", "from", "to", "exposed", "repeats"], rows=rows,
        note=f"Efficiency relative to {_baseline(sweep)}, with t intervals over the rounds." + law,
    )  # fmt: skip


def sweep_title(sweep: ScalingDocument) -> str:
    sizes = ", ".join(str(size.ranks) for size in sweep.sizes)
    return f"{sweep.recipe['run']['name']}: {sweep.settings.mode} scaling on {sizes} ranks"


def conclude_sweep(sweep: ScalingDocument) -> list[Conclusion]:
    """Returns the efficiency of the largest size, the law that was fitted, and what limits both."""
    found = []
    largest = sweep.sizes[-1] if sweep.sizes else None
    value = None if largest is None else largest.efficiency.get("value")
    if largest is not None and value is not None and largest.ranks > sweep.baseline_ranks:
        interval = ""
        if largest.efficiency.get("low") is not None:
            low, high, level = (largest.efficiency[name] for name in ("low", "high", "level"))
            interval = f" ({level:.0%} interval {low:.0%} to {high:.0%})"
        found.append(
            Conclusion(
                text=f"{largest.ranks} ranks reach {value:.0%}{interval} of the samples/s per rank on "
                f"{_baseline(sweep)}, a speedup of {largest.speedup['value']:.2f}.",
                source=f"{largest.repeats} rounds of the sweep, {sweep.settings.steps} steps each", weight=3,
                kind="good" if value >= ACCEPTABLE else "problem",
            )
        )  # fmt: skip
    fits = sweep.fits or {}
    if fits.get("chosen"):
        found.append(
            Conclusion(
                text=f"Of the scaling laws, {fits['chosen']} describes the rates.",
                source=str(fits["why"]),
                weight=2,
                kind="note",
            )
        )
    found += [Conclusion(text=f"{note}.", source="cores of the machine", weight=1) for note in sweep.notes]
    if not sweep.complete:
        found.append(
            Conclusion(text="The sweep is not complete.", source="its document", weight=4, kind="problem")
        )
    return sorted(found, key=lambda conclusion: -conclusion.weight)


def _baseline(sweep: ScalingDocument) -> str:
    return f"{sweep.baseline_ranks} rank{'s' * (sweep.baseline_ranks > 1)}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"
