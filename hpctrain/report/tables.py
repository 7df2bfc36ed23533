"""The tables of a report, and the price of a node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.errors import UsageError
from hpctrain.report.run_data import Record, RunData
from hpctrain.scaling import Efficiency, NodesPrediction, against
from hpctrain.supervise import effective_time
from hpctrain.telemetry import STEP_PARTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The price of a node, from a user's file.


class Prices(BaseModel):
    """The price of a node per hour, and the name or sign of the currency, as reports show it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_node_hour: float = Field(ge=0, allow_inf_nan=False)
    currency: str = Field(min_length=1, max_length=12)


def read_prices(path: Path) -> Prices:
    """Returns the prices in a TOML file with `per_node_hour` and `currency`. Raises UsageError for other content."""
    try:
        return Prices.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--prices {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"--prices {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; write two lines, such as "
            'per_node_hour = 1.5 and currency = "EUR"'
        ) from error


# Tables whose values stay numbers until they are written. Pure.


Value = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table: a name and a value per column.

    format: the format specification of numbers, such as ".1%"; text is shown unchanged, None as a dash. indent: the
    nesting level of the row's name, 0 for a top-level row.
    """

    name: str
    values: Sequence[Value]
    format: str = ""
    unit: str = ""
    indent: int = 0

    def shown(self) -> list[str]:
        """Returns the values as text."""
        return [_shown(value, self.format) for value in self.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a report.

    Attributes:
        name: The name of the table in file names, in lower case with hyphens.
        columns: The column headings.
        head: The heading of the rows' names.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    head: str = ""


def _shown(value: Value, specification: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return format(value, specification)


# The tables of a report. Pure.


Runs = Sequence[RunData]
J_PER_KWH = 3.6e6


def what_ran(runs: Runs) -> Table:
    def row(name: str, value: Callable[[RunData], Value], specification: str = "", unit: str = "") -> Row:
        return Row(name=name, values=[value(run) for run in runs], format=specification, unit=unit)

    return Table(
        name="what-ran",
        title="What ran where",
        columns=[run.label for run in runs],
        rows=[
            row("status", lambda run: run.status),
            row("ranks", lambda run: run.num_ranks),
            row("nodes", lambda run: _shortened(run.environment["node_names"])),
            row("device", lambda run: _of_all(run, "device")),
            row("threads per rank", lambda run: _of_all(run, "threads")),
            row("launcher", lambda run: str(run.environment.get("launcher", ""))),
            row("backend", lambda run: str(run.environment.get("backend", ""))),
            row(
                "reduction", lambda run: f"{run.environment.get('algorithm')}, {run.environment.get('wire')}"
            ),
            row("begun", lambda run: _date(run.starts[0]["time"]) if run.starts else None),
            row("starts", lambda run: len(run.starts)),
            row("steps", lambda run: int(run.steps[-1]["step"]) if run.steps else 0, ",d"),
            row("samples/s", lambda run: run.samples_per_s(), ",.0f"),
            row(
                "loss of the last step",
                lambda run: _number(run.steps[-1]["loss"]) if run.steps else None,
                ".4g",
            ),
            row("hpctrain", lambda run: str(run.environment.get("hpctrain", ""))),
            row("torch", lambda run: str(run.environment.get("packages", {}).get("torch", ""))),
        ],
    )


def quality(runs: Runs) -> Table | None:
    """Returns the metrics on held-out data of each run's last evaluation; None if no run has evaluated."""
    last = [dict(run.evaluations[-1]["quality"]) if run.evaluations else {} for run in runs]
    names = list(dict.fromkeys(name for found in last for name in found))
    if not names:
        return None
    rows = [
        Row(name=name, values=[_number(found.get(name)) for found in last], format=".4g") for name in names
    ]
    return Table(name="quality", title="Held out", columns=[run.label for run in runs], rows=rows)


def pop(runs: Runs) -> Table | None:
    """Returns the POP efficiencies of the runs; None if no run has measured efficiencies.

    If several runs have measured efficiencies, the table also compares each of these runs with the first.
    """
    measured = [(run, run.efficiency) for run in runs if run.efficiency is not None]
    if not measured:
        return None
    reference = measured[0][1]

    def row(name: str, value: Callable[[Efficiency], float], indent: int = 0) -> Row:
        return Row(name=name, values=[value(found) for _, found in measured], format=".1%", indent=indent)

    rows = [
        row("parallel efficiency", lambda found: found.factors.parallel),
        row("load balance", lambda found: found.factors.load_balance, 1),
        row("communication", lambda found: found.factors.communication, 1),
        row("serialisation", lambda found: found.factors.serialisation, 2),
        row("transfer", lambda found: found.factors.transfer, 2),
        row("share of computing", lambda found: found.factors.computing),
    ]
    note = "Parallel efficiency = load balance x communication; communication = serialisation x transfer."
    if len(measured) > 1:
        rows.insert(
            0, row("global efficiency", lambda found: against(found, reference=reference).global_efficiency)
        )
        rows += [
            row("computation scaling", lambda found: against(found, reference=reference).computation),
            row("samples/s per rank", lambda found: against(found, reference=reference).relative_speed),
        ]
        note += (
            " Global efficiency = parallel efficiency x share of computing x computation scaling. The last two and the "
            f"first are relative to {measured[0][0].label}."
        )
    return Table(
        name="pop", title="POP efficiencies", columns=[run.label for run, _ in measured], rows=rows, note=note
    )


def parts(runs: Runs) -> Table | None:
    """Returns how the time of a step is divided into parts, in ms; None if no run has measured the parts."""
    measured = [(run, run.efficiency) for run in runs if run.efficiency is not None]
    if not measured:
        return None
    rows = [
        Row(
            name=part.label, values=[1e3 * found.parts[part.name] for _, found in measured], format=",.3f", unit="ms",
        )
        for part in STEP_PARTS
    ]  # fmt: skip
    rows.append(
        Row(name="step", values=[1e3 * found.step_s for _, found in measured], format=",.3f", unit="ms")
    )
    return Table(
        name="parts", title="Where the time of a step went", columns=[run.label for run, _ in measured], rows=rows,
        note="ms per step, mean over ranks and steps; the parts add up to the step.",
    )  # fmt: skip


def step_times(runs: Runs) -> Table:
    shares = (0.5, 0.95, 0.99)

    def quantile(run: RunData, share: float) -> Value:
        seconds = [record["seconds"]["step"] for record in run.steps]
        return float(np.quantile(seconds, share)) * 1e3 if seconds else None

    rows = [
        Row(
            name=f"p{100 * share:.0f}",
            values=[quantile(run, share) for run in runs],
            format=",.2f",
            unit="ms",
        )
        for share in shares
    ]
    return Table(
        name="step-times", title="Time of a step", columns=[run.label for run in runs], rows=rows,
        note="Of rank 0; all ranks end a step together.",
    )  # fmt: skip


def checkpoints(runs: Runs) -> Table | None:
    """Returns number, size and time of the saves; None if no run has saved."""
    if not any(run.checkpoints for run in runs):
        return None

    def mean(run: RunData, name: str) -> Value:
        found = [float(record[name]) for record in run.checkpoints]
        return sum(found) / len(found) if found else None

    return Table(
        name="checkpoints",
        title="Checkpoints",
        columns=[run.label for run in runs],
        rows=[
            Row(name="saved", values=[len(run.checkpoints) for run in runs], format="d"),
            Row(name="newest, step", values=[_last(run, "step") for run in runs], format=",d"),
            Row(
                name="size",
                values=[_scaled(mean(run, "bytes"), 1e-6) for run in runs],
                format=",.2f",
                unit="MB",
            ),
            Row(
                name="written at", values=[mean(run, "mb_per_s") for run in runs], format=",.1f", unit="MB/s"
            ),
            Row(
                name="a save takes",
                values=[mean(run, "write_seconds") for run in runs],
                format=".3f",
                unit="s",
            ),
            Row(
                name="training stands still",
                values=[mean(run, "stall_seconds") for run in runs],
                format=".3f",
                unit="s",
            ),
        ],
        note="Means over the saves. A save that takes long but stalls little goes on in the background.",
    )


def resources(runs: Runs, *, prices: Prices | None, slurm_j: Mapping[str, float] | None = None) -> Table:
    """Returns node-hours, cost and energy of the runs.

    slurm_j: the energy of each job in joules, from Slurm's accounting; None: Slurm was not asked.
    """
    hours = [run.node_hours() for run in runs]
    epochs = [len({record["epoch"] for record in run.steps}) for run in runs]
    rows = [
        Row(name="node-hours", values=hours, format=",.4g"),
        Row(
            name="node-hours per epoch",
            values=[_per(h, n) for h, n in zip(hours, epochs, strict=True)], format=",.4g",
        ),
        Row(
            name="effective training time",
            values=[effective_time(run.attempts).share if run.attempts else None for run in runs], format=".1%",
        ),
    ]  # fmt: skip
    note = "Node-hours of supervised runs count from the start of each attempt, of others the time of the steps. "
    note += _energy_note(runs)
    energy = [None if run.energy is None else run.energy.total_j / J_PER_KWH for run in runs]
    if any(value is not None for value in energy):
        rows.append(Row(name="energy", values=energy, format=",.4g", unit="kWh"))
    if slurm_j is not None:
        rows.append(
            Row(
                name="energy of the jobs, by Slurm's accounting",
                values=[_kwh_of_jobs(run, slurm_j) for run in runs], format=",.4g", unit="kWh",
            )
        )  # fmt: skip
    if prices is not None:
        rows.insert(
            1,
            Row(
                name="cost",
                values=[h * prices.per_node_hour for h in hours],
                format=",.2f",
                unit=prices.currency,
            ),
        )
    return Table(
        name="resources", title="Resources", columns=[run.label for run in runs], rows=rows, note=note
    )


def _energy_note(runs: Runs) -> str:
    found = [run.energy for run in runs if run.energy is not None]
    if not found:
        return "No energy counter could be read."
    sources = ", ".join(sorted({source for energy in found for source in energy.joules}))
    missing = sum(run.num_nodes - len(run.energy.ranks) for run in runs if run.energy is not None)
    note = (
        f"Energy counted by {sources} on the runs' nodes over all starts, other jobs on these nodes included."
    )
    return note + (f" The counters of {missing} nodes could not be read." if missing > 0 else "")


def _kwh_of_jobs(run: RunData, slurm_j: Mapping[str, float]) -> Value:
    known = [slurm_j[job] for job in run.jobs() if job in slurm_j]
    return sum(known) / J_PER_KWH if known else None


def other_nodes(run: RunData) -> Table | None:
    """Returns the predictions for other numbers of nodes; None if there are none."""
    advice = run.advice
    if advice is None or len(advice.predictions) < 2:
        return None
    found = advice.predictions

    def row(name: str, value: Callable[[NodesPrediction], Value], specification: str, unit: str = "") -> Row:
        return Row(name=name, values=[value(one) for one in found], format=specification, unit=unit)

    rows = [
        row("number of ranks", lambda one: one.ranks, ",d"),
        row("step", lambda one: 1e3 * one.step_s, ",.1f", "ms"),
        row("from", lambda one: 1e3 * one.low_s, ",.1f", "ms"),
        row("to", lambda one: 1e3 * one.high_s, ",.1f", "ms"),
        row("time to the end", lambda one: one.time_s / 3600, ",.3g", "h"),
        row("node-hours", lambda one: one.node_hours, ",.3g"),
    ]
    if any(one.energy_j is not None for one in found):
        kwh = row(
            "energy", lambda one: None if one.energy_j is None else one.energy_j / J_PER_KWH, ",.3g", "kWh"
        )
        rows.append(kwh)
    return Table(
        name=f"nodes-{run.label}", title=f"Other numbers of nodes for {run.label}", head="nodes", rows=rows,
        columns=[f"{one.nodes}" + (" (now)" if one.nodes == advice.nodes else "") for one in found],
        note="Predicted for the same global batch, with as many ranks on each node; from, to: 90 % interval. Waiting "
        f"in a queue for nodes is not included. From {advice.basis}.",
    )  # fmt: skip


def attempts(run: RunData) -> Table | None:
    """Returns the table of the attempts of a supervised run; None for other runs."""
    if not run.attempts:
        return None
    rows = [
        Row(
            name=f"{attempt.number}",
            values=[
                _date(attempt.began),
                None if attempt.ended is None else f"{attempt.ended - attempt.began:,.0f} s",
                _shortened(attempt.nodes),
                None if attempt.cause is None else attempt.cause.value,
                attempt.reason or None,
                attempt.steps_gained,
                attempt.steps_lost,
                attempt.decision or None,
            ],
        )
        for attempt in run.attempts
    ]
    columns = ["began", "lasted", "nodes", "cause", "reason", "steps gained", "lost", "decision"]
    return Table(
        name=f"attempts-{run.label}",
        title=f"Attempts of {run.label}",
        columns=columns,
        rows=rows,
        head="attempt",
    )


def incidents(run: RunData, *, most: int = 50) -> Table | None:
    """Returns the newest incidents of a run, at most `most`; None if the run had no incidents."""
    if not run.incidents:
        return None
    rows = [
        Row(
            name=str(record["kind"]).replace("_", " "),
            values=[record.get("step"), _date(record["time"]), _details(record)],
        )
        for record in run.incidents[-most:]
    ]
    left = len(run.incidents) - len(rows)
    note = f"{left} earlier ones are in the records." if left else ""
    return Table(
        name=f"incidents-{run.label}", title=f"Incidents of {run.label}", columns=["step", "time", "details"],
        rows=rows,
        note=note, head="kind",
    )  # fmt: skip


def incident_text(record: Record) -> str:
    """Returns the record of an incident as one line of text, without the time of the incident."""
    where = f", step {record['step']}" if record.get("step") is not None else ""
    return f"{str(record['kind']).replace('_', ' ')}{where}: {_details(record)}"


def _details(record: Record) -> str:
    hidden = {"kind", "time", "step"}
    return ", ".join(f"{name} {_plain(value)}" for name, value in record.items() if name not in hidden)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(_plain(each) for each in value)
    return str(value)


def _of_all(run: RunData, name: str) -> str:
    found = list(dict.fromkeys(str(rank[name]) for rank in run.environment["ranks"]))
    return ", ".join(found) if len(found) <= 4 else f"{found[0]}, … ({len(found)} different)"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]} ({len(names)})"


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _number(value: object) -> Value:
    return value if isinstance(value, int | float | str) else None


def _last(run: RunData, name: str) -> Value:
    return int(run.checkpoints[-1][name]) if run.checkpoints else None


def _scaled(value: Value, factor: float) -> Value:
    return value * factor if isinstance(value, float) else None


def _per(a: float, count: int) -> Value:
    return a / count if count else None
