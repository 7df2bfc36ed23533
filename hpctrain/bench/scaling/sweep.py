"""A scaling sweep: its plan, its table, and its JSON document, from which an unfinished sweep resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.table import Table

from hpctrain.bench.document import document_head, write_document
from hpctrain.bench.figures import empty_table, show_number
from hpctrain.bench.step.plan import StepCell, order_of_runs
from hpctrain.errors import UsageError
from hpctrain.telemetry import CLOCK_KEYS, OPTIONAL_KEYS

# The JSON document of a scaling sweep, `hpctrain.bench.scaling/1`. It is also the state from which a sweep
# resumes.
#
# Times are seconds, rates samples/s, `started` and `ended` seconds since 1970. A reader that only wants the
# results needs `sizes` (one entry per number of ranks) and `fits`; one that computes its own efficiencies
# needs `runs`, where `by_rank` has every rank's seconds, summed over the measured steps.


SCHEMA: Literal["hpctrain.bench.scaling/1"] = "hpctrain.bench.scaling/1"
Mode = Literal["strong", "weak"]
# The measured parts of a step; the runs of a sweep do not evaluate.
PARTS = tuple(key for key in CLOCK_KEYS if key != "evaluation")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class RankSums(_Part):
    """Sums over the measured steps of one run, for one rank.

    seconds: seconds by name, with the names of metrics/rank-*.jsonl: `step`, the parts of a step (`PARTS`), and `sync`,
    the whole time of the reduction, which overlaps other parts.
    """

    rank: int
    host: str
    node: str
    samples: int
    seconds: dict[str, float]


class ScalingRun(_Part):
    """One run, that is, one start of the ranks.

    Attributes:
        round: The number of the round, from 0; each round has one run of every size.
        place: The index of the run within its round, from 0.
        samples_per_s: The samples of all ranks divided by the sum of `step_s`.
        step_s: The seconds of each measured step on its slowest rank.
        samples: The number of samples of all ranks and measured steps.
        sample_sums: For each measured step a hash of the set of samples of all ranks, 16 hexadecimal digits.
        by_rank: For each rank, its sums over the measured steps.
        job: The ID of the run's own Slurm job; None if the run had no job of its own.
        environment: The run's environment.json, in the first run of each size; null in the other runs.
    """

    round: int
    place: int
    ranks: int
    nodes: int
    global_batch: int
    started: float
    ended: float
    samples_per_s: float
    step_s: list[float]
    samples: int
    sample_sums: list[str]
    by_rank: list[RankSums]
    job: str | None = None
    environment: dict[str, Any] | None = None


class SweepSettings(_Part):
    """The settings of a sweep. A sweep must be resumed with the same settings, except that `repeats` may grow.

    Attributes:
        nodes: The numbers of nodes, if the sizes were given as numbers of nodes; else None.
        steps: The number of measured steps per run.
        warmup_steps: The number of steps before the measured ones; these are not counted.
        repeats: The number of rounds.
        seed: The seed of the random order of sizes within each round.
        threads_per_rank: The number of threads per rank, the same for all sizes; None before it is decided.
        start: How ranks are started. `launch`: by mpirun here, or by srun within this allocation; `jobs`: in one Slurm
            job per run.
        cores: The number of cores of a node that the ranks of each size share, if the sweep compares splits of these
            cores into ranks and threads; then each size has its own number of threads. Else None.
    """

    mode: Mode
    ranks: list[int]
    nodes: list[int] | None = None
    ranks_per_node: int | None = None
    steps: int
    warmup_steps: int
    repeats: int
    seed: int
    threads_per_rank: int | None = None
    start: Literal["launch", "jobs"] = "launch"
    cores: int | None = None
    overrides: list[str] = Field(default_factory=list)

    def size_name(self, ranks: int) -> str:
        """Returns a size as text: `2 ranks`, or `2 ranks x 1 thread` if the sweep compares splits."""
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        threads = self.threads_of(ranks)
        return name if self.cores is None else f"{name} x {threads} thread{'s' * (threads != 1)}"

    def threads_of(self, ranks: int) -> int | None:
        """Returns the number of threads of each of `ranks` ranks; None before it is decided."""
        return self.threads_per_rank if self.cores is None else self.cores // ranks


class SizeResult(_Part):
    """The results of one number of ranks, computed from all its runs.

    Attributes:
        samples_per_s: `median`, `q1`, `q3`, `min`, `max` and `count` over the runs.
        step_s: The same fields over all measured steps of all runs.
        efficiency: Samples/s per rank relative to the baseline in the same rounds, with the fields of
            `RatioEstimate`: `value` (geometric mean), `low`, `high` (t interval at confidence `level`), `least`,
            `greatest` (over the rounds), `range_level`, `count`, `paired`.
        speedup: Samples/s relative to the baseline, with the same fields. For the baseline itself, efficiency and
            speedup are 1 without an interval.
        seconds: The seconds per step by name, as means over ranks and runs: `step`, the parts of a step (`PARTS`), and
            `other`, the rest that no part covers.
        shared_cores: Whether ranks had to share cores; the results then do not apply to ranks with cores of their own.
    """

    ranks: int
    nodes: int
    global_batch: int
    repeats: int
    samples_per_s: dict[str, float]
    step_s: dict[str, float]
    efficiency: dict[str, Any]
    speedup: dict[str, Any]
    seconds: dict[str, float]
    shared_cores: bool


class SamplesCheck(_Part):
    """How the samples of the runs were compared.

    Attributes:
        rule: A sentence that says which runs had the same samples.
        runs: The number of runs compared.
        steps: The number of measured steps per run.
    """

    rule: str
    runs: int
    steps: int


class FailedSplit(_Part):
    """A split whose last run failed, and the exit code of this run."""

    ranks: int
    exit_code: int


class SplitVerdict(_Part):
    """With which split the model trains fastest, as far as the rounds so far show.

    Attributes:
        fastest: The number of ranks of the split with the most samples/s.
        undecided: The numbers of ranks of the splits that the rounds cannot tell from the fastest.
        use: The number of ranks to use: of the fastest split and the undecided ones, the fewest, which need the least
            memory. After a single round: of the fastest split.
        ratios: By number of ranks of each other split: samples/s of the fastest over those of this split, with the
            fields of `RatioEstimate`. The intervals hold together with 95%.
        failed: The splits that are not compared because a run failed.
        text: The verdict in a sentence.
        start: How to start ranks and threads like this: by hand, in a batch script and in a recipe.
    """

    fastest: int
    undecided: list[int]
    use: int
    ratios: dict[int, dict[str, Any]]
    failed: list[FailedSplit]
    text: str
    start: str


class ScalingDocument(_Part):
    """The JSON document of a scaling sweep.

    Attributes:
        complete: Whether all rounds were measured; otherwise `--resume` continues.
        recipe: The recipe, every key with its value.
        baseline_ranks: The size to which efficiency and speedup are relative.
        fits: `chosen` (a law's name or null), `why`, and `laws`, each with `law`, `formula`, `rate_1`, `parameters`
            (`name`, `value`, `error`, `low`, `high`, `at_bound`), `residual`, `aicc`, `checked_by`, `misfit_p`,
            `peak_ranks`, `efficiency` and `predicted` (by number of ranks); null while fewer than two sizes are
            measured, and for splits.
        splits: The verdict on the splits of a node's cores; None for other sweeps, whose files do not have this field.
        runs: All runs, in the order in which they were made.
    """

    schema_: Literal["hpctrain.bench.scaling/1"] = Field(SCHEMA, alias="schema")
    time: float
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, Any]
    complete: bool
    recipe_path: str
    recipe: dict[str, Any]
    settings: SweepSettings
    baseline_ranks: int
    samples: SamplesCheck | None
    sizes: list[SizeResult]
    fits: dict[str, Any] | None
    runs: list[ScalingRun]
    notes: list[str]
    splits: SplitVerdict | None = None

    def as_json(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", by_alias=True)
        if self.settings.cores is None:
            del found["splits"], found["settings"]["cores"]
        return found

    def unmeasured_splits(self) -> list[FailedSplit]:
        """Returns the splits that failed before they had a result."""
        measured = {size.ranks for size in self.sizes}
        return [one for one in (self.splits.failed if self.splits else []) if one.ranks not in measured]


def document_start(*, commit: str | None) -> dict[str, Any]:
    """Returns the fields of a sweep's JSON document that describe this machine and this version of hpctrain.

    A resumed sweep keeps these fields.
    """
    return document_head(SCHEMA, commit=commit)


def read_scaling_document(path: Path, *, option: str = "") -> ScalingDocument:
    """Reads the JSON document of a sweep. Raises UsageError if the document is not valid.

    option: option of the command line with which the user gave the path, for the message.
    """
    named = f"{option} {path}".strip()
    try:
        return ScalingDocument.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{named} is not a document of `hpctrain bench scaling`: it is not text") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{named} is not a document of `hpctrain bench scaling`: {where}: {first['msg']}"
        ) from error


def write_scaling_document(path: Path, document: ScalingDocument) -> None:
    """Writes the document atomically. Raises UsageError if it cannot be written."""
    write_document(path, document.as_json())


# Plans a scaling sweep: its sizes, the order of its runs, and the runs that remain. Pure.


LEAST_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A planned start of the ranks. `round` and `place`, the index within the round, are counted from 0."""

    round: int
    place: int
    cell: StepCell


def ranks_of_nodes(nodes: Sequence[int], *, ranks_per_node: int | None) -> list[int]:
    """Returns the number of ranks for each number of nodes. Raises UsageError if `ranks_per_node` is None."""
    if ranks_per_node is None:
        raise UsageError(
            "--nodes needs to know how many ranks a node has: give --ranks-per-node, or slurm.tasks_per_node in "
            "the recipe"
        )
    return [count * ranks_per_node for count in nodes]


def check_settings(settings: SweepSettings, *, batch: int) -> None:
    """Raises UsageError if the sweep cannot be measured. `batch` is the recipe's global batch."""
    if settings.repeats < LEAST_REPEATS:
        raise UsageError(
            f"--repeats {settings.repeats}: intervals and comparisons need at least {LEAST_REPEATS} rounds (three "
            "against three cannot even reach p = 0.05); `hpctrain bench step` measures with fewer"
        )
    if settings.mode == "strong" and max(settings.ranks) > batch:
        fewer = "fewer ranks, --weak," if settings.cores is None else "--ranks with some of the splits,"
        raise UsageError(
            f"{max(settings.ranks)} ranks cannot share the recipe's global batch of {batch} (strong scaling): use "
            f"{fewer} or a larger batch with --set data.global_batch=N"
        )
    per_node = settings.ranks_per_node
    if settings.start == "jobs" and per_node is not None:
        uneven = [n for n in settings.ranks if n > per_node and n % per_node]
        if uneven:
            raise UsageError(
                f"--jobs: {uneven[0]} ranks do not fill nodes of {per_node}: choose multiples of {per_node}, or "
                "another --ranks-per-node"
            )


def sweep_cells(settings: SweepSettings, *, batch: int) -> list[StepCell]:
    """Returns the sizes of the sweep: each number of ranks with its global batch.

    In strong scaling the ranks share the recipe's batch; in weak scaling each rank has that batch.
    """
    return [
        StepCell(num_ranks=n, global_batch=batch * (n if settings.mode == "weak" else 1))
        for n in settings.ranks
    ]


def plan_runs(settings: SweepSettings, *, batch: int) -> list[PlannedRun]:
    """Returns all runs in their order: every size once per round, in a random order that depends on the seed.

    More repeats only add rounds; the order of earlier rounds stays the same.
    """
    cells = sweep_cells(settings, batch=batch)
    order = order_of_runs(cells, repeats=settings.repeats, seed=settings.seed)
    return [
        PlannedRun(round=number // len(cells), place=number % len(cells), cell=cell)
        for number, cell in enumerate(order)
    ]


def remaining_runs(planned: Iterable[PlannedRun], done: Iterable[ScalingRun]) -> list[PlannedRun]:
    """Returns the runs that are not measured yet, in order."""
    measured = {(run.round, run.ranks) for run in done}
    return [run for run in planned if (run.round, run.cell.num_ranks) not in measured]


def check_same_sweep(
    previous: ScalingDocument,
    *,
    settings: SweepSettings,
    recipe: Mapping[str, Any],
    commit: str | None,
    machine: Mapping[str, Any],
) -> None:
    """Raises UsageError if further runs would not belong to the same measurement as the runs of `previous`."""
    changed = [
        name
        for name in SweepSettings.model_fields
        if name not in ("repeats", "overrides")
        and getattr(previous.settings, name) != getattr(settings, name)
    ]
    differs = [f"settings.{name}" for name in changed]
    differs += [f"recipe section [{name}]" for name in recipe if recipe[name] != previous.recipe.get(name)]
    if previous.commit != commit:
        differs.append(f"commit {previous.commit} is now {commit}")
    differs += [
        f"machine's {name} {previous.machine.get(name)} is now {machine[name]}"
        for name in ("cpu", "cores", "devices")
        if machine[name] != previous.machine.get(name)
    ]
    if settings.repeats < max((run.round + 1 for run in previous.runs), default=0):
        differs.append(f"--repeats {settings.repeats} is less than was measured")
    if differs:
        raise UsageError(
            f"--resume: the options differ from those of the runs so far ({'; '.join(differs)}), so that further runs "
            "could not be compared with these. Give the same options, or another --json to start a new sweep"
        )


# Prints a scaling document: a table of the sizes, and lines on the laws.


def scaling_table(document: ScalingDocument) -> Table:
    """Returns a table with one row per size. Its title states the baseline and the kind of interval."""
    settings = document.settings
    sizes = document.sizes
    rounds = max((size.repeats for size in sizes), default=0)
    splits = settings.cores is not None
    what = f"{settings.cores} cores split" if splits else f"{settings.mode} scaling"
    title = (
        f"{document.recipe['run']['name']}: {what}, {rounds} interleaved "
        f"round{'s' * (rounds != 1)} of {settings.steps} steps after {settings.warmup_steps}; relative to "
        f"{settings.size_name(document.baseline_ranks)}, "
        "[95% t interval] of the rounds' ratios"
    )
    shown = [name for name in (*PARTS, "other") if name != "checkpoint"]
    parts = [n for n in shown if n not in OPTIONAL_KEYS or any(size.seconds.get(n) for size in sizes)]
    # Splits use the same cores of one node, so that their efficiency is their speedup.
    columns = ["ranks", "threads" if splits else "nodes", "batch", "samples/s", "step, ms", "speedup"]
    columns += [] if splits else ["efficiency"]
    table = empty_table(title, [*columns, *(name.removesuffix("_sync") for name in parts)])
    for size in sizes:
        table.add_row(
            str(size.ranks),
            str(settings.threads_of(size.ranks) if splits else size.nodes),
            str(size.global_batch),
            _with_range(size.samples_per_s, "q1", "q3", show_number),
            show_number(1e3 * size.step_s["median"]),
            _with_range(size.speedup, "low", "high", lambda value: f"{value:.2f}"),
            *([] if splits else [_with_range(size.efficiency, "low", "high", lambda value: f"{value:.0%}")]),
            *(f"{size.seconds[name] / size.seconds['step']:.1%}" for name in parts),
        )
    for one in document.unmeasured_splits():
        table.add_row(str(one.ranks), str(settings.threads_of(one.ranks)), "", "failed")
    return table


def scaling_lines(document: ScalingDocument) -> list[str]:
    """Returns the lines below the table: fitted laws, which law to use and why, what was checked, notes."""
    lines = []
    if document.splits is not None:
        lines += [document.splits.text, document.splits.start]
    if document.fits is not None:
        lines += [_law_line(law, chosen=document.fits["chosen"]) for law in document.fits["laws"]]
        lines.append(f"law: {document.fits['chosen'] or 'none'}: {document.fits['why']}")
        chosen = next((law for law in document.fits["laws"] if law["law"] == document.fits["chosen"]), None)
        if chosen is not None:
            shown = ", ".join(f"{value:.0%} on {ranks}" for ranks, value in chosen["predicted"].items())
            lines.append(f"beyond what was measured, if it holds there: efficiency {shown} ranks")
    if document.samples is not None:
        lines.append(f"checked over {document.samples.runs} runs: {document.samples.rule}")
    lines += document.notes
    if not document.complete:
        lines.append("not complete: --resume measures the rounds that are left")
    return lines


def _law_line(law: Mapping[str, Any], *, chosen: str | None) -> str:
    parts = [f"{_parameter(p)}" for p in law["parameters"]]
    parts.append("no residual" if law["residual"] is None else f"residual {law['residual']:.1%}")
    parts.append("no AICc" if law["aicc"] is None else f"AICc {law['aicc']:.1f}")
    if law["peak_ranks"] is not None:
        parts.append(f"fastest on {law['peak_ranks']:.0f} ranks")
    mark = "*" if law["law"] == chosen else " "
    return f"{mark} {law['law']}: {law['formula']}; {', '.join(parts)}"


def _parameter(parameter: Mapping[str, Any]) -> str:
    value = f"{parameter['name']} = {parameter['value']:.3g}"
    if parameter["error"] is not None:
        return f"{value} +- {parameter['error']:.2g}"
    return f"{value} (at its bound)" if parameter["at_bound"] else value


def _with_range(values: Mapping[str, Any], low: str, high: str, show: Callable[[float], str]) -> str:
    middle = show(values["median"] if "median" in values else values["value"])
    if values[low] is None or values[low] == values[high]:
        return middle
    brackets = "[]" if low == "low" else "()"
    return f"{middle} {brackets[0]}{show(values[low])}-{show(values[high])}{brackets[1]}"
