"""Converts measurements to records and defines their bars. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.parallel.layouts import BITS, LAYOUTS, Layout, Method
from benchmarks.results_file import Record, over_rounds

MOST_DIFFERENCE = 1e-10
MOST_OFF_MEMORY = 0.05
MOST_OF_TRAFFIC = 1.03
MOST_OFF_LOSS = 1e-12
LEAST_FASTER = {True: 1.2, False: 1.0}  # by whether links bind


def equality_records(found: Mapping[int, Mapping[str, Mapping[str, float]]], *, steps: int) -> list[Record]:
    """found: by number of ranks, workload and layout, see `cases.equality`."""
    by_pair: dict[tuple[str, str], dict[int, float]] = {}
    for num_ranks, of in found.items():
        for workload, layouts in of.items():
            for layout, off in layouts.items():
                by_pair.setdefault((workload, layout), {})[num_ranks] = off
    return [
        Record(
            id=f"parallel.1.{workload}.{layout}",
            what=f"{workload}, {LAYOUTS[layout].what}, ranks {', '.join(map(str, off))}: relative difference of the "
            f"parameters from one process after {steps} steps, the largest",
            value=max(off.values()), bar=MOST_DIFFERENCE, sense="at most", unit="", samples=off,
        )
        for (workload, layout), off in by_pair.items()
    ]  # fmt: skip


def memory_record(layout: Layout, found: Mapping[str, Any], *, num_ranks: int, sharing: int) -> Record:
    """found: see `cases.memory`. sharing: ranks that share a copy of the model."""
    formula = layout.bytes_a_parameter(sharing) * found["parameters"]
    off = [held / formula - 1 for held in found["held_bytes"]]
    return Record(
        id=f"parallel.2.{layout.name}.{num_ranks}",
        what=f"{layout.what}, {_ranks(num_ranks)}, {found['parameters'] / 1e6:.1f} million parameters: growth of a "
        f"rank's memory off {formula / 1e6:.0f} MB, {layout.bytes_a_parameter(sharing):g} bytes a parameter",
        value=max(map(abs, off)), bar=MOST_OFF_MEMORY, sense="at most", unit="", samples=dict(found) | {"off": off},
    )  # fmt: skip


def traffic_record(
    layout: Layout, wire: str, found: Mapping[str, Any], *, num_nodes: int, ranks_per_node: int, steps: int
) -> Record:
    """found: see `cases.traffic`. Layouts that are not on `nodes` have one rank on each."""
    factor = layout.sent(num_nodes, BITS[wire])
    formula = factor * 4 * found["parameters"]
    counted = found[f"{layout.name}/{wire}"]
    return Record(
        id=f"parallel.3.{layout.name}.{wire}",
        what=f"{layout.what}, {wire}, {num_nodes} nodes x {_ranks(ranks_per_node)}: bytes that leave a node in a "
        f"step / {factor:.3g} of the parameters' bytes, {formula / 1e6:.1f} MB",
        value=max(counted["node_bytes"]) / steps / formula, bar=MOST_OF_TRAFFIC, sense="at most", unit="bytes/bytes",
        samples={**counted, "steps": steps, "formula_bytes": formula, "pause": found["pause"]},
    )  # fmt: skip


def time_records(
    seconds: Mapping[str, Sequence[float]],
    methods: Mapping[str, Method],
    *,
    place: str,
    where: str,
    binds: bool,
) -> list[Record]:
    """Returns the records at one place and link rate.

    seconds: of a step, by method, of each round. binds: whether the links limit the speed there. The best of a group is
    the one with the smallest median, of hpctrain's layouts and of the peers.
    """
    ours = [name for name in seconds if methods[name].layout is not None]
    peers = [name for name in seconds if methods[name].layout is None]
    rows: list[tuple[str, list[str], list[str]]] = []
    for label, wires in (("best", ("fp32",)), ("best-16", ("fp16",))):
        rows.append(
            (
                label,
                [n for n in ours if methods[n].wire in wires],
                [n for n in peers if methods[n].wire in wires],
            )
        )
    for name in ours:
        layout = methods[name].layout
        if methods[name].wire == "fp32" and layout is not None:
            rows.append((layout, [name], [LAYOUTS[layout].peer]))
    made = []
    for label, mine, others in rows:
        here = [name for name in others if name in seconds]
        if not mine or not here:
            continue
        us, peer = (min(names, key=lambda name: median(seconds[name])) for names in (mine, here))
        medians = f"{1e3 * median(seconds[peer]):.0f} / {1e3 * median(seconds[us]):.0f} ms"
        ratios = [b / a for a, b in zip(seconds[us], seconds[peer], strict=True)]
        made.append(
            Record(
                id=f"parallel.4.{place}.{label}",
                what=f"{where}: {methods[peer].what} on Gloo / ours, {methods[us].what}: {medians}",
                value=median(ratios), bar=LEAST_FASTER[binds], sense="at least", unit="times as fast",
                samples=dict(seconds) if label == "best" else {us: seconds[us], peer: seconds[peer]},
                **over_rounds(seconds[peer], seconds[us]),
            )
        )  # fmt: skip
    return made


def checkpoint_records(
    saved: Mapping[str, Sequence[float]],
    loaded: Mapping[int, Mapping[str, Mapping[str, Any]]],
    *,
    num_ranks: int,
) -> list[Record]:
    """saved: layout -> its next losses. loaded: number of ranks -> what `checkpoints.load` returned there. num_ranks:
    that have saved."""
    made = []
    for ranks, pairs in loaded.items():
        off = {
            pair: max(
                abs(loss / expected - 1)
                for loss, expected in zip(found["losses"], saved[pair.partition("/")[0]], strict=True)
            )
            for pair, found in pairs.items()
        }
        different = {pair: found["different"] for pair, found in pairs.items()}
        what = f"{len(pairs)} pairs of layouts, saved on {_ranks(num_ranks)}, loaded on {_ranks(ranks)}"
        made += [
            Record(id=f"parallel.6.bits.{ranks}", what=f"{what}: tensors whose bits differ, the most of a pair",
                   value=max(different.values()), bar=0, sense="at most", unit="tensors", samples=different),
            Record(id=f"parallel.6.loss.{ranks}", what=f"{what}: relative difference of the next losses, the largest",
                   value=max(off.values()), bar=MOST_OFF_LOSS, sense="at most", unit="", samples=off),
        ]  # fmt: skip
    return made


def dcp_record(found: Mapping[str, int]) -> Record:
    """found: see `checkpoints.dcp`."""
    exported = sum(name.startswith("to/") for name in found)
    return Record(
        id="parallel.6.dcp",
        what=f"torch DCP, {exported} exports and {len(found) - exported} import: tensors whose bits differ, the most "
        "of one",
        value=max(found.values()), bar=0, sense="at most", unit="tensors", samples=dict(found),
    )  # fmt: skip


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
