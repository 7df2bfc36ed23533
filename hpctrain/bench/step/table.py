"""Table of the step measurement."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hpctrain.bench.spread import Spread, describe_spread, show_number
from hpctrain.bench.step.measure import StepRow


def step_table(rows: Sequence[StepRow], *, title: str) -> Table:
    """Table with one line per mode and number of ranks: medians, with the quartiles if there are several runs."""
    table = Table(title=title, title_justify="left")
    table.add_column("scaling", no_wrap=True)
    for name in ("ranks", "batch", "samples/s", "step, ms", "efficiency", "exposed, ms", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1].mode is not row.mode
        table.add_row(
            row.mode.value,
            str(row.cell.num_ranks),
            str(row.cell.global_batch),
            describe_spread(row.samples_per_s, show_number),
            _ms(row.step_s),
            f"{row.efficiency:.0%}",
            _ms(row.exposed_s),
            f"{row.exposed_share.median:.1%}",
            end_section=last,
        )
    return table


def _ms(seconds: Spread) -> str:
    return describe_spread(seconds, lambda value: show_number(1e3 * value))
