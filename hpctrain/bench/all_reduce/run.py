"""Runs the all-reduce measurement on the ranks of a session, and creates its JSON document, table and plot."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from rich.table import Table

from hpctrain.bench.all_reduce.measure import (
    AllReduceAsked,
    AllReduceMeasured,
    AllReduceRow,
    bound_seconds,
    bus_bandwidth,
    measure_all_reduce,
)
from hpctrain.bench.document import document_head
from hpctrain.bench.figures import Spread, describe_bytes, describe_spread, empty_table, show_number
from hpctrain.comm import Collective, ReduceOp, Transport
from hpctrain.errors import UsageError
from hpctrain.reduce import (
    ALGORITHM_NAMES,
    AUTO,
    AUTO_WIRES,
    ELEMENT_BYTES,
    NCCL_ALGORITHMS,
    Algorithm,
    BucketReducer,
    Capabilities,
    ReducerMaker,
    ReductionRequest,
    ZeroReducer,
    choose_algorithm,
    encodes_every_value,
    make_reduction,
    parse_algorithm,
)
from hpctrain.run import Session, environment_record
from hpctrain.topology import Topology

# Measures the rate of the links between nodes with plain messages.


MESSAGE_BYTES = 1 << 20
ROUNDS = 3
ROUND_S = 0.5
MAX_MESSAGES = 2048


def measure_link(transport: Transport, *, comm: Collective) -> float | None:
    """Returns the bytes/s that each node sends while it receives at the same rate. Collective.

    The first rank of each node sends messages to the first rank of the next node, several at a time; the other ranks
    wait. The time of a round is that of the slowest node, and the best of three rounds counts. This takes about 2 s.
    Returns None if there is only one node.
    """
    firsts = [ranks[0] for ranks in transport.topology.ranks_by_node]
    if len(firsts) == 1:
        return None
    seconds = _shift(transport, comm=comm, firsts=firsts, num_messages=4)  # also opens the connections
    seconds = _shift(transport, comm=comm, firsts=firsts, num_messages=8)
    num_messages = min(MAX_MESSAGES, max(8, round(8 * ROUND_S / seconds)))
    best_s = min(
        _shift(transport, comm=comm, firsts=firsts, num_messages=num_messages) for _ in range(ROUNDS)
    )
    return num_messages * MESSAGE_BYTES / best_s


def _shift(transport: Transport, *, comm: Collective, firsts: list[int], num_messages: int) -> float:
    """Sends `num_messages` messages to the next node, four at a time. Returns the slowest rank's seconds.

    Collective.
    """
    outgoing = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    incoming = [torch.empty_like(outgoing) for _ in range(4)]
    comm.barrier()
    started = time.perf_counter()
    if transport.rank in firsts:
        place = firsts.index(transport.rank)
        to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
        for begin in range(0, num_messages, len(incoming)):
            count = min(len(incoming), num_messages - begin)
            pending = [transport.receive(incoming[n], source=source, tag=n) for n in range(count)]
            pending += [transport.send(outgoing, to=to, tag=n) for n in range(count)]
            while not transport.all_done(pending):
                time.sleep(50e-6)
    longest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    comm.all_reduce(longest, op=ReduceOp.MAX)
    return float(longest)


# Makes the reducers to be measured, in the same way as for training.


ALGORITHMS = ALGORITHM_NAMES


def parse_names(text: str, *, option: str, valid: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Parses names separated by commas.

    Returns each name once, in the given order; for the text `all`, returns `usual`. Raises UsageError if a name is not
    in `valid`.
    """
    if text.strip() == "all":
        return usual
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise UsageError(f"{option}: there is no {unknown[0]!r}; choose among {', '.join(valid)}, or all")
    return names


def nccl_to_start(algorithms: tuple[str, ...]) -> str | None:
    """Returns the requested NCCL algorithm, which Horovod must know when it starts; None if none is requested.

    Raises UsageError if more than one is requested.
    """
    asked = [name for name in algorithms if name in NCCL_ALGORITHMS]
    if len(asked) > 1:
        raise UsageError(
            f"--algorithms: {' and '.join(asked)} cannot be measured in one process, since Horovod uses the algorithm "
            "with which it was started: call this command once for each of them"
        )
    return asked[0] if asked else None


@final
class ReducersHere:
    """Creates reducers as a training run of this session does. Implements `MakeReducer`. Collective.

    If algorithm or wire format is `auto`, a calibration measures the candidates and chooses one; it does not use cached
    results of earlier runs. `calibrations` has the measurements and the choice, by (algorithm, wire format) as asked.

    Args:
        gradient_bytes: The total size of the buckets of one reducer.
        nccl: The NCCL algorithm with which Horovod was started.
    """

    def __init__(self, session: Session, *, gradient_bytes: int, nccl: str | None = None) -> None:
        self._session = session
        self._nccl = session.reductions.nccl(nccl or AUTO)
        self._gradient_bytes = gradient_bytes
        self._maker = ReducerMaker(
            session.world, topology=session.topology, device=session.device.type, gradient_bytes=gradient_bytes,
            nccl=self._nccl, note=session.note,
        )  # fmt: skip
        self.calibrations: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, algorithm: str, wire: str) -> BucketReducer:
        session = self._session
        if algorithm != AUTO:
            wires = AUTO_WIRES if wire == AUTO else (wire,)
            for each in wires:
                check_runs(parse_algorithm(algorithm), wire=each, capabilities=self._maker.capabilities)
        if AUTO in (algorithm, wire):
            return self._by_measurement(algorithm, wire)
        # start_step=0: compressed from the first reduction on, as in the middle of a training run.
        if not encodes_every_value(wire) and session.world_size > 1:
            return self._maker.make_sparse(wire, start_step=0)
        return self._maker.make(parse_algorithm(algorithm), wire=wire)

    def _by_measurement(self, algorithm: str, wire: str) -> BucketReducer:
        session = self._session
        made = make_reduction(
            session.world, ReductionRequest(algorithm=algorithm, wire=wire), topology=session.topology,
            device=session.device, gradient_bytes=self._gradient_bytes, nccl=self._nccl, note=session.note,
        )  # fmt: skip
        self.calibrations[algorithm, wire] = made.record
        assert not isinstance(made.reducer, ZeroReducer)
        return made.reducer

    def lines(self) -> list[str]:
        """Returns lines that describe every choice and the measurements on which it is based."""
        lines = []
        for (algorithm, wire), record in self.calibrations.items():
            head = f"auto, {wire}" if algorithm == AUTO else f"{algorithm}, wire auto"
            lines.append(
                f"{head}: {record['algorithm']} ({record['wire']}); buckets of "
                f"{describe_bytes(record['bucket_bytes'])} ({record['source']})"
            )
            for entry in record.get("candidates", []):
                rate = (
                    "-" if entry["seconds_per_byte"] <= 0 else f"{1e-6 / entry['seconds_per_byte']:,.0f} MB/s"
                )
                lines.append(
                    f"  {entry['algorithm']}, {entry['wire']}: latency {1e3 * entry['latency_s']:.3g} ms, {rate} in "
                    f"large buckets, from {len(entry['measured'])} sizes"
                )
        return lines


def check_runs(asked: Algorithm, *, wire: str, capabilities: Capabilities) -> None:
    """Raises UsageError if another algorithm would run instead of `asked`. The message does not name `asked`."""
    if capabilities.topology.num_ranks == 1:
        if asked is not Algorithm.FLAT:
            raise UsageError(
                "one rank sends nothing, so that all algorithms are the same: see the row of flat"
            )
        return
    if asked is Algorithm.FLAT and capabilities.nccl is not None and encodes_every_value(wire):
        raise UsageError(f"{capabilities.nccl.value} would run instead: Horovod was started with it")
    decision = choose_algorithm(asked, wire=wire, capabilities=capabilities)
    if decision.note is not None:
        reason = decision.note.rpartition(" is used: ")[2]
        raise UsageError(f"{decision.algorithm.value} would run instead: {reason}")


# Runs the all-reduce measurement on the ranks of a session and builds its JSON document.


SCHEMA = "hpctrain.bench.allreduce/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """The rate of a node's link in one direction. `source` is `given` or `measured`."""

    bytes_per_s: float
    source: str

    def describe(self) -> str:
        return f"{8 * self.bytes_per_s / 1e6:,.0f} Mbit/s ({self.source})"


def parse_link(text: str | None) -> float | None:
    """Parses `--link-mbit`. Returns the rate in bytes/s; None if `text` is None or `measure`. Raises UsageError."""
    if text is None or text == "measure":
        return None
    try:
        mbit = float(text)
    except ValueError:
        mbit = 0.0
    if not 0 < mbit < 1e9:
        raise UsageError(f"--link-mbit {text}: give the rate in Mbit/s, or `measure`")
    return mbit * 1e6 / 8


def find_link(text: str | None, *, session: Session) -> LinkRate | None:
    """Returns the rate of the link, as given in `text` or else measured. Collective.

    Returns None if `text` is None, or if the rate cannot be measured.
    """
    given = parse_link(text)
    if given is not None:
        return LinkRate(bytes_per_s=given, source="given")
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
    return LinkRate(bytes_per_s=found, source="measured")


def all_reduce_on(
    session: Session,
    asked: AllReduceAsked,
    *,
    reducers: ReducersHere,
    link: LinkRate | None,
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
    )


def all_reduce_document(
    session: Session,
    asked: AllReduceAsked,
    found: AllReduceMeasured,
    *,
    reducers: ReducersHere,
    link: LinkRate | None,
    commit: str | None,
) -> dict[str, Any]:
    """Returns the JSON document of `--json`, whose fields docs/guides/benchmarks.md describes.

    Collective; rank 0 writes it.
    """
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


# Table of the all-reduce measurement.


def all_reduce_table(rows: Sequence[AllReduceRow], *, title: str) -> Table:
    """Returns a table with one row per combination of size, algorithm and wire format.

    With several nodes, the table has columns for the traffic between nodes. If lower bounds on the times are known, a
    column compares the times with these bounds.
    """
    between_nodes = any(row.bound_bytes_per_node for row in rows)
    bounded = any(row.bound_s is not None for row in rows)
    columns = ["size", "algorithm", "wire", "time, ms", "algbw, MB/s", "busbw, MB/s"]
    columns += ["out of a node", "x bound"] if between_nodes else []
    columns += ["time x bound"] if bounded else []
    table = empty_table(title, [*columns, "error"], texts=("algorithm", "wire"))
    for place, row in enumerate(rows):
        cells = [
            describe_bytes(row.num_bytes),
            _what_ran(row.algorithm, row.runs),
            _what_ran(row.wire, row.wire_runs),
            describe_spread(_in_ms(row.seconds), show_number),
            show_number(row.algbw / 1e6),
            show_number(row.busbw / 1e6),
        ]
        if between_nodes:
            cells.append(describe_bytes(row.sent_bytes_per_node))
            cells.append(_ratio(row.sent_bytes_per_node, row.bound_bytes_per_node))
        if bounded:
            cells.append(_ratio(row.seconds.median, row.bound_s))
        cells.append(f"{row.relative_error:.0e}")
        last = place + 1 == len(rows) or rows[place + 1].num_bytes != row.num_bytes
        table.add_row(*cells, end_section=last)
    return table


def _what_ran(asked: str, ran: str) -> str:
    return asked if asked == ran else f"{asked}: {ran}"


def _in_ms(seconds: Spread) -> Spread:
    return Spread(
        median=1e3 * seconds.median,
        q1=1e3 * seconds.q1,
        q3=1e3 * seconds.q3,
        min=1e3 * seconds.min,
        max=1e3 * seconds.max,
        count=seconds.count,
    )


def _ratio(value: float, bound: float | None) -> str:
    return (
        "-" if not bound else f"{value / bound:,.2f}" if value < 100 * bound else show_number(value / bound)
    )


# Plots bus bandwidth over size. matplotlib is imported only when a plot is requested.


SUFFIXES = (".png", ".svg", ".pdf")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D")


def check_plot(path: Path) -> None:
    """Raises UsageError if no plot can be written to `path`. Call it before the measurement starts."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the file name must end in one of {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'hpctrain[plot]', or measure with --json "
            "and plot elsewhere"
        )


def plot_all_reduce(
    rows: Sequence[AllReduceRow],
    path: Path,
    *,
    topology: Topology,
    title: str,
    link_bytes_per_s: float | None = None,
) -> None:
    """Writes the plot, with a colour per algorithm, a line style per wire format, and the quartiles as a band.

    The bound, in grey, is the bus bandwidth that a wire format would reach if each node sent only `bound_bytes`, at the
    link's rate, and nothing else took time.
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


def _mb_per_s(row: AllReduceRow, seconds: float) -> float:
    """Returns the row's bus bandwidth in MB/s, for a reduction that takes `seconds`."""
    return row.busbw * row.seconds.median / seconds / 1e6 if seconds > 0 else 0.0


def _bound(num_bytes: int, *, wire: str, topology: Topology, link_bytes_per_s: float) -> float | None:
    seconds = bound_seconds(
        num_bytes // ELEMENT_BYTES, wire=wire, num_nodes=topology.num_nodes, link_bytes_per_s=link_bytes_per_s
    )
    return (
        None if seconds is None else bus_bandwidth(num_bytes, seconds=seconds, num_ranks=topology.num_ranks)
    )
