"""Plots bus bandwidth over size. matplotlib is imported only when a plot is requested."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hpctrain.bench.all_reduce.bandwidth import bound_seconds, bus_bandwidth
from hpctrain.bench.all_reduce.measure import Row
from hpctrain.bench.sizes import describe_bytes
from hpctrain.errors import UsageError
from hpctrain.reduce import ELEMENT_BYTES
from hpctrain.topology import Topology

SUFFIXES = (".png", ".svg", ".pdf")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D")


def check_plot(path: Path) -> None:
    """Raises UsageError if no plot can be written to `path`. Called before the measurement starts."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the file name must end in one of {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'hpctrain[plot]', or measure with --json "
            "and plot elsewhere"
        )


def plot_all_reduce(
    rows: Sequence[Row], path: Path, *, topology: Topology, title: str, link_bytes_per_s: float | None = None
) -> None:
    """Writes the plot: a colour per algorithm, a line style per wire, the quartiles as a band, the bound in grey.

    The bound of a wire is the bus bandwidth if each node sent only `bound_bytes` at the link's rate, and nothing else
    took time.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display on a compute node
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    wires = list(dict.fromkeys(row.wire for row in rows))
    sizes = sorted({row.num_bytes for row in rows})
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    try:
        for algorithm in algorithms:
            colour = f"C{algorithms.index(algorithm) % 10}"
            for number, wire in enumerate(wires):
                line = [row for row in rows if (row.algorithm, row.wire) == (algorithm, wire)]
                if not line:
                    continue
                x = [row.num_bytes for row in line]
                low, high = ([_mb_per_s(row, seconds) for row, seconds in pairs] for pairs in (
                    [(row, row.seconds.q3) for row in line], [(row, row.seconds.q1) for row in line],
                ))  # fmt: skip
                axes.plot(
                    x, [row.busbw / 1e6 for row in line], color=colour, linestyle=_LINES[number % len(_LINES)],
                    marker=_MARKERS[number % len(_MARKERS)], markersize=4, label=f"{algorithm}, {wire}",
                )  # fmt: skip
                axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        if link_bytes_per_s is not None and topology.num_nodes > 1:
            for number, wire in enumerate(dict.fromkeys(row.wire_runs for row in rows)):
                bound = _bound(sizes[-1], wire=wire, topology=topology, link_bytes_per_s=link_bytes_per_s)
                if bound is not None:
                    axes.axhline(
                        bound / 1e6, color="0.45", linewidth=1, linestyle=_LINES[number % len(_LINES)],
                        label=f"bound, {wire}: the link at {8 * link_bytes_per_s / 1e6:.0f} Mbit/s",
                    )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sizes, [describe_bytes(size) for size in sizes], rotation=30, ha="right")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.set_xlabel("gradients, float32")
        axes.set_ylabel("bus bandwidth, MB/s")
        axes.set_title(title, fontsize="medium")
        figure.legend(loc="outside right center", fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def _mb_per_s(row: Row, seconds: float) -> float:
    """Bus bandwidth of the row in MB/s if it had taken `seconds`."""
    return row.busbw * row.seconds.median / seconds / 1e6 if seconds > 0 else 0.0


def _bound(num_bytes: int, *, wire: str, topology: Topology, link_bytes_per_s: float) -> float | None:
    seconds = bound_seconds(
        num_bytes // ELEMENT_BYTES, wire=wire, num_nodes=topology.num_nodes, link_bytes_per_s=link_bytes_per_s
    )
    return (
        None if seconds is None else bus_bandwidth(num_bytes, seconds=seconds, num_ranks=topology.num_ranks)
    )
