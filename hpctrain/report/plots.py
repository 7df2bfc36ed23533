"""The figures of a report, drawn by matplotlib without a display and without global state.

Figures use the colours of `PALETTE`. An HTML page replaces the colours with CSS variables, so that figures suit light
and dark themes.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.report.conclusions import ReductionLimit
from hpctrain.report.run_data import RunData
from hpctrain.scaling import attribute
from hpctrain.telemetry import PART_NAMES, STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MplFigure

    from hpctrain.bench import ScalingDocument

# CSS variable: colour on white. Okabe and Ito's colours, which colour-blind readers tell apart.
PALETTE: Mapping[str, str] = {
    "ink": "#1f2328", "faint": "#c8ced6",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#009e73", "c3": "#cc79a7",
    "c4": "#e69f00", "c5": "#56b4e9", "c6": "#8c6d31", "c7": "#b5a900", "c8": "#7f7f7f",
}  # fmt: skip
SERIES = tuple(colour for name, colour in PALETTE.items() if name.startswith("c"))
_WIDTH_IN = 6.4
# More ranks than these are not drawn one by one.
_MOST_RANKS = 64
_MOST_POINTS = 600
# Smaller parts of a step are drawn, and not listed in words.
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure. `name` is used in file names; `text` describes the figure for readers who cannot see it."""

    name: str
    title: str
    text: str
    figure: MplFigure

    def svg(self) -> str:
        """Returns the figure as an SVG element with CSS variables as colours and with selectable text."""
        import matplotlib as mpl

        written = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(
                written, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
        found = written.getvalue()
        found = found[found.index("<svg") :]
        found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
        found = re.sub(
            r'<svg [^>]*viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', found, count=1
        )
        for name, colour in PALETTE.items():
            found = found.replace(colour, f"var(--{name})")
        return found

    def png(self) -> bytes:
        written = io.BytesIO()
        self.figure.savefig(written, format="png", dpi=200, facecolor="white")
        return written.getvalue()


def check_matplotlib(options: str) -> None:
    """Raises UsageError if matplotlib is not installed. `options` starts the message, such as "--html needs"."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{options} matplotlib, which is not installed: pip install 'hpctrain[plot]', or use --markdown of "
            "hpctrain report"
        )


def plots_of(
    runs: Sequence[RunData], *, sweep: ScalingDocument | None, limits: Sequence[ReductionLimit | None]
) -> list[Plot]:
    """Returns the figures for which the runs have data.

    limits: for each run, the lower bound on the time of its reductions; None for a run on one rank.
    """
    found = [
        _loss(runs),
        _speed(runs),
        _parts(runs),
        _reduction(runs, limits),
        *(_ranks(run) for run in runs),
    ]
    if sweep is not None:
        found.insert(0, _efficiency(sweep))
    return [plot for plot in found if plot is not None]


def _axes(*, height_in: float = 3.0) -> tuple[MplFigure, Axes]:
    import matplotlib as mpl
    from matplotlib.figure import Figure as MplFigure

    ink = PALETTE["ink"]
    look = {
        "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink,
        "grid.color": PALETTE["faint"], "font.size": 9.0, "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"], "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False,
    }  # fmt: skip
    with mpl.rc_context(look):
        figure = MplFigure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=True, linewidth=0.5)
        axes.set_axisbelow(True)
    return figure, axes


def _legend(figure: MplFigure, *, columns: int) -> None:
    figure.legend(
        loc="outside lower center", ncols=columns, fontsize=8, frameon=False, labelcolor=PALETTE["ink"]
    )  # fmt: skip


def _loss(runs: Sequence[RunData]) -> Plot | None:
    shown = [run for run in runs if run.steps]
    if not shown:
        return None
    figure, axes = _axes()
    ends = []
    for number, run in enumerate(shown):
        points = [(r["step"], r["loss"]) for r in run.steps if isinstance(r["loss"], float | int)]
        x, y = _thinned(points)
        axes.plot(x, y, color=SERIES[number % len(SERIES)], linewidth=1.2, label=run.label)
        if points:
            ends.append(f"{run.label} ends at {points[-1][1]:.4g} after step {points[-1][0]}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _legend(figure, columns=4)
    return Plot(
        name="loss", title="Loss", text="Loss over the steps: " + "; ".join(ends) + ".", figure=figure
    )


def _speed(runs: Sequence[RunData]) -> Plot | None:
    shown = [run for run in runs if len(run.steps) > 1]
    if not shown:
        return None
    figure, axes = _axes()
    texts = []
    for number, run in enumerate(shown):
        seconds = np.array([record["seconds"]["step"] for record in run.steps])
        samples = np.diff([0, *(record["global_samples"] for record in run.steps)])
        steps = np.array([record["step"] for record in run.steps])
        window = max(1, len(steps) // 40)
        count = len(steps) // window * window
        sums = [part[:count].reshape(-1, window).sum(axis=1) for part in (samples, seconds)]
        axes.plot(
            steps[:count].reshape(-1, window)[:, -1], sums[0] / np.maximum(sums[1], 1e-12),
            color=SERIES[number % len(SERIES)], linewidth=1.2, label=run.label,
        )  # fmt: skip
        speed = run.samples_per_s()
        texts.append(f"{run.label} {'unknown' if speed is None else f'{speed:,.0f}'}")
    axes.set_xlabel("step")
    axes.set_ylabel("samples/s of all ranks")
    axes.set_ylim(bottom=0)
    _legend(figure, columns=4)
    return Plot(
        name="speed", title="Throughput", text="Samples/s of all ranks over the steps; on the whole: "
        + ", ".join(texts) + ".", figure=figure,
    )  # fmt: skip


def _parts(runs: Sequence[RunData]) -> Plot | None:
    measured = [(run, run.efficiency) for run in runs if run.efficiency is not None]
    if not measured:
        return None
    figure, axes = _axes(height_in=1.3 + 0.4 * len(measured))
    left = np.zeros(len(measured))
    for number, part in enumerate(STEP_PARTS):
        width = np.array([1e3 * found.parts[part.name] for _, found in measured])
        axes.barh(
            range(len(measured)),
            width,
            left=left,
            color=SERIES[number % len(SERIES)],
            label=part.label,
            height=0.6,
        )
        left += width
    axes.set_yticks(range(len(measured)), [run.label for run, _ in measured])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    _legend(figure, columns=4)
    text = "; ".join(
        f"{run.label}: " + ", ".join(
            f"{part.label} {found.parts[part.name] / found.step_s:.0%}"
            for part in STEP_PARTS
            if found.parts[part.name] > _LEAST_SHARE * found.step_s
        )
        for run, found in measured
    )  # fmt: skip
    return Plot(name="parts", title="Where the time of a step went", text=text + ".", figure=figure)


def _reduction(runs: Sequence[RunData], limits: Sequence[ReductionLimit | None]) -> Plot | None:
    shown = [
        (run.label, limit)
        for run, limit in zip(runs, limits, strict=True)
        if limit is not None and limit.least_s is not None and limit.measured_s is not None
    ]
    if not shown:
        return None
    figure, axes = _axes(height_in=1.3 + 0.5 * len(shown))
    places = np.arange(len(shown))

    def draw(
        seconds: Sequence[float | None], *, at: float, colour: str, label: str, left: NDArray[np.float64]
    ) -> None:
        axes.barh(
            places + at, [1e3 * (each or 0) for each in seconds], 0.36, left=left, color=colour, label=label
        )

    nothing = np.zeros(len(shown))
    hidden = np.array([1e3 * (limit.hidden_s or 0) for _, limit in shown])
    draw([each.least_s for _, each in shown], at=-0.19, colour=SERIES[-1], label="at least", left=nothing)
    draw(
        [each.hidden_s for _, each in shown],
        at=0.19,
        colour=SERIES[1],
        label="hidden reduction",
        left=nothing,
    )
    draw(
        [each.exposed_s for _, each in shown],
        at=0.19,
        colour=SERIES[2],
        label="exposed reduction",
        left=hidden,
    )
    axes.set_yticks(places, [label for label, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    _legend(figure, columns=3)
    text = "; ".join(
        f"{label}: at least {1e3 * (limit.least_s or 0):.3g} ms, measured {1e3 * (limit.measured_s or 0):.3g} ms"
        for label, limit in shown
    )
    return Plot(name="reduction", title="Reduction against the limit", text=text + ".", figure=figure)


def _ranks(run: RunData) -> Plot | None:
    if run.times is None or run.times.num_ranks < 2:
        return None
    by_rank = attribute(run.times).mean(axis=1) * 1e3
    waiting = by_rank[:, PART_NAMES.index("waiting")]
    order: NDArray[np.intp] = np.arange(len(by_rank))
    if len(by_rank) > _MOST_RANKS:
        order = np.sort(np.argsort(waiting)[:_MOST_RANKS])
    figure, axes = _axes()
    bottom = np.zeros(len(order))
    for number, part in enumerate(STEP_PARTS):
        axes.bar(
            range(len(order)), by_rank[order, number], bottom=bottom, color=SERIES[number % len(SERIES)],
            label=part.label, width=0.8,
        )  # fmt: skip
        bottom += by_rank[order, number]
    every = max(1, len(order) // 16)
    axes.set_xticks(range(0, len(order), every), [str(rank) for rank in order[::every]])
    axes.set_xlabel("rank" if len(order) == len(by_rank) else f"the {len(order)} ranks that waited least")
    axes.set_ylabel("ms per step")
    _legend(figure, columns=4)
    return Plot(
        name=f"ranks-{run.label}",
        title=f"Ranks of {run.label}",
        text=f"Time of a step on each rank: rank {int(waiting.argmin())} waited least for others, "
        f"{waiting.min():.3g} ms, and rank {int(waiting.argmax())} most, {waiting.max():.3g} ms.",
        figure=figure,
    )


def _efficiency(sweep: ScalingDocument) -> Plot | None:
    sizes = [size for size in sweep.sizes if size.efficiency.get("value") is not None]
    if not sizes:
        return None
    figure, axes = _axes()
    x = [size.ranks for size in sizes]
    y = np.array([100 * size.efficiency["value"] for size in sizes])
    ends = [
        np.array([100 * (size.efficiency.get(end) or size.efficiency["value"]) for size in sizes])
        for end in ("low", "high")
    ]
    axes.axhline(100, color=PALETTE["faint"], linewidth=1.5, label="ideal")
    axes.errorbar(
        x, y, yerr=[np.maximum(y - ends[0], 0), np.maximum(ends[1] - y, 0)], color=SERIES[0], marker="o", markersize=4,
        linewidth=1.2, capsize=3, label="measured, with t intervals",
    )  # fmt: skip
    law = _chosen_law(sweep)
    if law is not None:
        curve = sorted((int(ranks), 100 * value) for ranks, value in law["efficiency"].items())
        axes.plot(
            [ranks for ranks, _ in curve], [value for _, value in curve], color=SERIES[1], linestyle="--",
            linewidth=1.2, label=f"{law['law']}, fitted",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(ranks) for ranks in x])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("efficiency, %")
    axes.set_ylim(bottom=0)
    _legend(figure, columns=3)
    text = ", ".join(f"{value:.0f}% on {_counted(ranks)}" for ranks, value in zip(x, y, strict=True))
    return Plot(
        name="efficiency", title=f"Efficiency, {sweep.settings.mode} scaling",
        text=f"Samples/s per rank relative to {_counted(sweep.baseline_ranks)}: {text}.", figure=figure,
    )  # fmt: skip


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _chosen_law(sweep: ScalingDocument) -> dict[str, dict[str, float]] | None:
    if not sweep.fits or not sweep.fits.get("chosen"):
        return None
    return next((law for law in sweep.fits["laws"] if law["law"] == sweep.fits["chosen"]), None)


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Returns at most `_MOST_POINTS` points, each the mean of adjacent points, so that a page stays small."""
    width = -(-len(points) // _MOST_POINTS) if points else 1
    groups = [points[at : at + width] for at in range(0, len(points), width)]
    return [group[-1][0] for group in groups], [sum(y for _, y in group) / len(group) for group in groups]
