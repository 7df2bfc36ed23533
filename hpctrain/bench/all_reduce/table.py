"""Table of the all-reduce measurement."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hpctrain.bench.all_reduce.measure import Row
from hpctrain.bench.sizes import describe_bytes
from hpctrain.bench.spread import Spread, describe_spread, show_number


def all_reduce_table(rows: Sequence[Row], *, title: str) -> Table:
    """Table with one line per cell. Has traffic columns if there are several nodes, and a bound on time if known."""
    between_nodes = any(row.bound_bytes_per_node for row in rows)
    bounded = any(row.bound_s is not None for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("wire", no_wrap=True)
    table.add_column("time, ms", justify="right", no_wrap=True)
    table.add_column("algbw, MB/s", justify="right", no_wrap=True)
    table.add_column("busbw, MB/s", justify="right", no_wrap=True)
    if between_nodes:
        table.add_column("out of a node", justify="right", no_wrap=True)
        table.add_column("x bound", justify="right", no_wrap=True)
    if bounded:
        table.add_column("time x bound", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
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
