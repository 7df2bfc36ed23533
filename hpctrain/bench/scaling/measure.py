"""The implementation of `hpctrain bench scaling`: makes the missing runs, and keeps the document up to date."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from hpctrain.bench.scaling.results import fits_of, size_results
from hpctrain.bench.scaling.splits import BUSY_OVER_S, busy_notes, judge_splits, without_threads
from hpctrain.bench.scaling.sweep import (
    FailedSplit,
    Mode,
    PlannedRun,
    RankSums,
    SamplesCheck,
    ScalingDocument,
    ScalingRun,
    SplitVerdict,
    SweepSettings,
    check_same_sweep,
    check_settings,
    document_start,
    plan_runs,
    read_scaling_document,
    remaining_runs,
    write_scaling_document,
)
from hpctrain.bench.step.plan import StepCell, recipe_of, runs_folder, shares_cores, threads_of_a_rank
from hpctrain.bench.step.run import HowToRun, launch_run, read_steps
from hpctrain.data import add_sample_sums
from hpctrain.errors import DataError, HpctrainError, LaunchError, StoppedEarly, UsageError
from hpctrain.launch import Launcher, LocalMachine, SlurmController, survey_machine
from hpctrain.run import Recipe, to_toml, working_commit
from hpctrain.slurm import kill_jobs, plan_job, queued_jobs, submit_job
from hpctrain.telemetry import RunDirectory, in_words

# Makes one run of a sweep: starts its ranks as a user does, waits, and reads their records.


class Starter(Protocol):
    """The interface of an object that starts the ranks of a run."""

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> str | None:
        """Trains `recipe` to its end on `cell.num_ranks` ranks, with the run directory `directory`/run.

        Returns the ID of the run's own Slurm job, or None if the run had no job of its own. Raises StoppedEarly if this
        process was asked to stop. If the run fails, raises the error class of its exit code, or LaunchError for a Slurm
        job; the message ends with the run's last lines of output.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Starts ranks from this process, as `hpctrain launch` does: by mpirun, or by srun in this allocation."""

    how: HowToRun

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> None:
        path = directory / "recipe.toml"
        path.write_text(to_toml(recipe), encoding="utf-8")
        how = replace(self.how, threads=recipe.run.threads_per_rank or self.how.threads)
        launch_run(path, cell, how=how, output=directory / "output.txt")


def run_size(
    recipe: Recipe,
    planned: PlannedRun,
    *,
    settings: SweepSettings,
    starter: Starter,
    threads: int,
    directory: Path,
    with_environment: bool,
    keep: Path | None = None,
) -> ScalingRun:
    """Makes one run in `directory`, which is removed at the end.

    Args:
        threads: The number of threads per rank, unless the recipe sets it.
        with_environment: Whether the result contains the run's environment.json.
        keep: A folder into which the run directory of a successful run is moved as `ranks-N`. An older directory of
            this name is replaced.

    Raises the errors of `Starter.start`, and LaunchError if records are missing.
    """
    directory.mkdir(parents=True)
    try:
        changed = recipe_of(
            recipe, planned.cell, directory=directory / "run", steps=settings.warmup_steps + settings.steps,
            threads=threads,
        )  # fmt: skip
        telemetry = changed.telemetry.model_copy(update={"sample_sums": True})
        started = time.time()
        job = starter.start(
            changed.model_copy(update={"telemetry": telemetry}), planned.cell, directory=directory
        )
        ended = time.time()
        first = settings.warmup_steps + 1
        steps = read_steps(
            directory / "run", num_ranks=planned.cell.num_ranks, first_step=first, last_step=first + settings.steps - 1
        )  # fmt: skip
        environment = RunDirectory(directory / "run", error=LaunchError).environment()
        if keep is not None:
            _keep(directory / "run", keep / f"ranks-{planned.cell.num_ranks}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return summarize_run(
        planned, steps, environment=environment, started=started, ended=ended, job=job,
        with_environment=with_environment,
    )  # fmt: skip


def summarize_run(
    planned: PlannedRun,
    steps: Sequence[Sequence[dict[str, Any]]],
    *,
    environment: dict[str, Any],
    started: float,
    ended: float,
    job: str | None,
    with_environment: bool,
) -> ScalingRun:
    """Returns the run's entry of the sweep's JSON document. A pure function.

    steps: for each rank, its records of the measured steps.

    Raises LaunchError if the records have no hash of their samples.
    """
    at_once = list(zip(*steps, strict=True))
    if not all("sample_sum" in record for step in at_once for record in step):
        raise LaunchError(
            "the run's records have no `sample_sum`: were its ranks started with another version of hpctrain?"
        )
    step_s = [max(record["seconds"]["step"] for record in step) for step in at_once]
    samples = sum(record["samples"] for step in at_once for record in step)
    by_rank = [
        RankSums(
            rank=rank, host=about["host"], node=about["node"], samples=sum(record["samples"] for record in records),
            seconds=_sums(records),
        )
        for rank, (about, records) in enumerate(zip(environment["ranks"], steps, strict=True))
    ]  # fmt: skip
    return ScalingRun(
        round=planned.round,
        place=planned.place,
        ranks=planned.cell.num_ranks,
        nodes=len(environment["node_names"]),
        global_batch=planned.cell.global_batch,
        started=started,
        ended=ended,
        samples_per_s=samples / sum(step_s),
        step_s=step_s,
        samples=samples,
        sample_sums=[add_sample_sums(record["sample_sum"] for record in step) for step in at_once],
        by_rank=by_rank,
        job=job,
        environment=environment if with_environment else None,
    )


def _keep(directory: Path, target: Path) -> None:
    """Moves a run directory, without its checkpoints. Raises LaunchError if it cannot."""
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory, target)
    except OSError as error:
        raise LaunchError(f"the run cannot be kept in {target}: {error.strerror}") from error


def _sums(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record["seconds"])
    return {name: sum(record["seconds"].get(name, 0.0) for record in records) for name in names}


# Starts each run of a sweep as a Slurm job of its own size, from the recipe's section [slurm].


LAST_LINES = 20
# The controller serves all users: it is asked at growing intervals, until the run has written its summary.
FIRST_PAUSE_S, LONGEST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0, 1.0
# Another node's file may be seen late on a network filesystem.
SEEN_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Jobs:
    """Submits one job at a time and waits for its end.

    Attributes:
        ranks_per_node: The number of ranks per node. A job with fewer ranks gets one node.
        module_folder: A folder that is searched for the task's module, in addition to PYTHONPATH.
        folder: The folder in which sbatch is called.
    """

    controller: SlurmController
    ranks_per_node: int
    module_folder: Path
    folder: Path

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> str:
        path = directory / "recipe.toml"
        path.write_text(to_toml(self._with_job(recipe, cell, directory=directory)), encoding="utf-8")
        planned = plan_job(path, folder=self.folder)
        job_id = submit_job(
            planned, self.controller, by="bench scaling", arguments=["--resume", "never"]
        ).job_id
        summary = directory / "run" / "summary.json"
        try:
            state = self._wait(job_id, summary)
        except KeyboardInterrupt:
            kill_jobs([job_id], self.controller)
            raise StoppedEarly(f"stopped during job {job_id}, which was cancelled") from None
        if state not in ("", "COMPLETED") or not _finished(summary):
            raise LaunchError(
                f"job {job_id} on {cell.num_ranks} ranks with a global batch of {cell.global_batch} did not finish. "
                f"Its last lines:\n{_last_lines(directory / 'output.txt')}"
            )
        return job_id

    def _with_job(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> Recipe:
        per_node = min(self.ranks_per_node, cell.num_ranks)
        given = recipe.slurm.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        slurm = recipe.slurm.model_copy(
            update={
                "nodes": cell.num_ranks // per_node,
                "tasks_per_node": per_node,
                "on_stop": "end",
                "shrinkable": False,
                "array": None,
                "sweep": {},
                "spares": 0,
                "launcher": "srun" if recipe.slurm.launcher == "supervise" else recipe.slurm.launcher,
                "output": str(directory / "output.txt"),
                "environment": {
                    **recipe.slurm.environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, [given, str(self.module_folder)])),
                },
            }
        )
        return recipe.model_copy(update={"slurm": slurm})

    def _wait(self, job_id: str, summary: Path) -> str:
        """Waits until the job has ended. Returns its state; empty if Slurm no longer knows it.

        Raises KeyboardInterrupt if a signal handler does.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            time.sleep(pause_s)
            jobs = queued_jobs(self.controller, [job_id])
            if all(job.ended for job in jobs):
                return jobs[-1].state if jobs else ""
            pause_s = LAST_PAUSE_S if summary.exists() else min(1.5 * pause_s, LONGEST_PAUSE_S)


def check_jobs(recipe: Recipe) -> None:
    """Raises UsageError if the recipe cannot run as jobs, or if no jobs can be submitted from this machine."""
    if "slurm" not in recipe.model_fields_set:
        raise UsageError(
            "--jobs: the recipe has no section [slurm], which says how a job is submitted: add one with time and, if "
            "your site wants them, partition and account"
        )
    if os.environ.get("SLURM_JOB_ID"):
        raise UsageError(
            f"--jobs submits jobs, but this shell is already in job {os.environ['SLURM_JOB_ID']}: leave out --jobs to "
            "measure in this allocation, or call it outside"
        )


def _finished(summary: Path) -> bool:
    deadline_s = time.monotonic() + SEEN_AFTER_S
    while not summary.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.5)
    return bool(json.loads(summary.read_text(encoding="utf-8"))["status"] == "finished")


def _last_lines(output: Path) -> str:
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-LAST_LINES:]) or "  (it printed nothing)"


# Checks that the runs of a sweep trained on the same samples. Pure.


_RULES = {
    "strong": "every run had the same samples in each step, on every number of ranks",
    "weak": "runs on the same number of ranks had the same samples in each step; the global batch grows with the ranks",
}


def check_samples(runs: Sequence[ScalingRun], *, mode: Mode) -> SamplesCheck | None:
    """Compares the hashes of the samples of each measured step. Returns None if there are no runs.

    In strong scaling the hashes of all runs must be equal; in weak scaling, those of runs on the same number of ranks.
    Otherwise the times would measure different work: DataError is raised, which names the runs and the step.
    """
    first: dict[int, ScalingRun] = {}
    for run in runs:
        other = first.setdefault(run.ranks if mode == "weak" else 0, run)
        if run.sample_sums == other.sample_sums:
            continue
        step = next(
            (
                n
                for n, pair in enumerate(zip(run.sample_sums, other.sample_sums, strict=False))
                if len({*pair}) > 1
            ),
            min(len(run.sample_sums), len(other.sample_sums)),
        )
        raise DataError(
            f"the run on {run.ranks} ranks (round {run.round + 1}) did not train on the same samples as the one on "
            f"{other.ranks} ranks (round {other.round + 1}): they differ in measured step {step + 1}. Was the dataset "
            "changed, or does the data's order depend on the number of ranks?"
        )
    if not runs:
        return None
    return SamplesCheck(rule=_RULES[mode], runs=len(runs), steps=len(runs[0].sample_sums))


# Implementation of `hpctrain bench scaling`.


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlace:
    """Where a sweep runs and stores its results.

    Attributes:
        launcher: The launcher for ranks started by this process.
        scratch: The folder for the runs' files; None: chosen by `runs_folder`.
        document: The path of the JSON document.
        recipe_path: The path of the recipe as the user gave it. Its folder is searched for the task's module.
        keep: A folder that keeps the run directory of the last run of each size as `ranks-N`; None: all are removed.
    """

    recipe_path: Path
    document: Path
    launcher: Launcher = Launcher.AUTO
    scratch: Path | None = None
    keep: Path | None = None


@dataclass(kw_only=True, slots=True)
class _Sweep:
    """A sweep in progress. `head` has the document's first fields, as they were when the sweep was started.

    failed: the splits that are not measured further, in this call.
    busy: the share of this machine's CPU time that other programs used before each run of a split.
    """

    recipe: Recipe
    settings: SweepSettings
    place: SweepPlace
    machine: LocalMachine
    head: dict[str, Any]
    runs: list[ScalingRun] = field(default_factory=list)
    failed: list[FailedSplit] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return self.recipe.data.global_batch

    @property
    def remaining(self) -> list[PlannedRun]:
        return remaining_runs(plan_runs(self.settings, batch=self.batch), self.runs)

    def shares_cores(self, num_ranks: int) -> bool:
        per_node = self.settings.ranks_per_node
        return self.settings.start == "launch" and shares_cores(
            num_ranks, machine=self.machine, ranks_per_node=per_node
        )

    def document(self) -> ScalingDocument:
        of_splits = self.settings.cores is not None
        left_out = [one.ranks for one in self.failed]
        baseline = min(
            [ranks for ranks in self.settings.ranks if ranks not in left_out] or self.settings.ranks
        )
        fits = None if of_splits else fits_of(self.runs, mode=self.settings.mode)
        sizes = size_results(self.runs, baseline_ranks=baseline, shared=self.shares_cores)
        notes = [
            f"{size.ranks} ranks shared {self.machine.num_cores} cores: their figures do not apply to a machine with a "
            "core for each rank"
            for size in sizes
            if size.shared_cores
        ] + busy_notes(self.busy)
        return ScalingDocument(
            **self.head,
            complete=not self.remaining,
            recipe_path=str(self.place.recipe_path),
            recipe=self.recipe.model_dump(mode="json"),
            settings=self.settings,
            baseline_ranks=baseline,
            samples=check_samples(self.runs, mode=self.settings.mode),
            sizes=sizes,
            fits=None if fits is None else fits.as_json(),
            runs=self.runs,
            notes=notes,
            splits=self._verdict() if of_splits else None,
        )

    def _verdict(self) -> SplitVerdict | None:
        rates: dict[int, dict[int, float]] = {ranks: {} for ranks in self.settings.ranks}
        for run in self.runs:
            rates[run.ranks][run.round] = run.samples_per_s
        return judge_splits(
            rates, settings=self.settings, failed=self.failed, recipe=str(self.place.recipe_path)
        )


def measure_sweep(
    recipe: Recipe,
    settings: SweepSettings,
    *,
    place: SweepPlace,
    resume: bool = False,
    at_most_rounds: int | None = None,
) -> ScalingDocument:
    """Makes the runs of a scaling sweep, and writes its JSON document after each run. Returns the document.

    resume: whether to continue the sweep of `place.document`, if that file exists.
    at_most_rounds: end after this many further rounds; None: after all rounds.

    While ranks run, signals are handled as in `run_launch`. If the function is interrupted, the document is valid and
    the sweep can be resumed. A signal raises StoppedEarly or KeyboardInterrupt; a run that fails raises its error
    class. If the sweep compares splits of the cores into ranks and threads, the other splits are still measured after
    one split has failed, unless all splits have failed. Raises UsageError before the first run if the sweep cannot be
    measured or resumed, and DataError if a run trained on other samples than earlier runs.
    """
    check_settings(settings, batch=recipe.data.global_batch)
    machine = survey_machine()
    if settings.cores is None:
        threads = settings.threads_per_rank or _threads(recipe, settings, machine=machine)
        settings = settings.model_copy(update={"threads_per_rank": threads})
        recipe = recipe.model_copy(
            update={"run": recipe.run.model_copy(update={"threads_per_rank": threads})}
        )
    sweep = _begin(recipe, settings, place=place, machine=machine, resume=resume)
    left = sweep.remaining
    if at_most_rounds is not None and left:
        left = [run for run in left if run.round < left[0].round + at_most_rounds]
    starter = _starter(sweep)
    shared = settings.start == "jobs" or bool(os.environ.get("SLURM_JOB_ID"))
    if left:
        with _scratch(place.scratch or runs_folder(recipe, shared=shared)) as folder:
            _measure(sweep, left, starter=starter, folder=Path(folder))
    document = sweep.document()
    write_scaling_document(place.document, document)
    return document


def _threads(recipe: Recipe, settings: SweepSettings, *, machine: LocalMachine) -> int:
    """Returns the default number of CPU threads per rank."""
    if settings.start == "jobs":
        return recipe.slurm.cpus_per_task
    return threads_of_a_rank(max(settings.ranks), machine=machine, ranks_per_node=settings.ranks_per_node)


def _begin(
    recipe: Recipe, settings: SweepSettings, *, place: SweepPlace, machine: LocalMachine, resume: bool
) -> _Sweep:
    if settings.start == "jobs":
        check_jobs(recipe)
    commit = working_commit()
    head = document_start(commit=commit)
    previous = None
    if place.document.exists():
        previous = read_scaling_document(place.document, option="--json")
        if not resume and not previous.complete:
            raise UsageError(
                f"{place.document} holds an unfinished sweep of {len(previous.runs)} runs: continue it with --resume, "
                "or remove it"
            )
    runs: list[ScalingRun] = []
    if resume and previous is not None:
        check_same_sweep(
            previous, settings=settings, recipe=recipe.model_dump(mode="json"), commit=commit, machine=head["machine"]
        )  # fmt: skip
        head = {name: getattr(previous, name) for name in ("time", "commit", "machine", "versions")}
        runs = list(previous.runs)
    return _Sweep(recipe=recipe, settings=settings, place=place, machine=machine, head=head, runs=runs)


def _starter(sweep: _Sweep) -> Starter:
    module_folder = sweep.place.recipe_path.absolute().parent
    if sweep.settings.start == "jobs":
        return Jobs(
            controller=SlurmController(say=_say),
            ranks_per_node=sweep.settings.ranks_per_node or sweep.recipe.slurm.tasks_per_node,
            module_folder=module_folder,
            folder=Path.cwd(),
        )
    return Launches(
        how=HowToRun(
            machine=sweep.machine, launcher=sweep.place.launcher, ranks_per_node=sweep.settings.ranks_per_node,
            threads=_threads_of(sweep, max(sweep.settings.ranks)), module_folder=module_folder,
            environ=os.environ if sweep.settings.cores is None else without_threads(os.environ),
        )
    )  # fmt: skip


def _threads_of(sweep: _Sweep, ranks: int) -> int:
    threads = sweep.settings.threads_of(ranks)
    assert threads is not None, "decided before the first run"
    return threads


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(
            prefix=".hpctrain-scaling-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be written ({error.strerror}): give --scratch a folder that all nodes share"
        ) from error


def _measure(sweep: _Sweep, left: list[PlannedRun], *, starter: Starter, folder: Path) -> None:
    total = len(sweep.runs) + len(left)
    began_s = time.monotonic()
    for number, planned in enumerate(left):
        cell, settings = planned.cell, sweep.settings
        name = settings.size_name(cell.num_ranks)
        if any(one.ranks == cell.num_ranks for one in sweep.failed):
            continue
        if settings.cores is not None and not os.environ.get("SLURM_JOB_ID"):
            sweep.busy.append(psutil.cpu_percent(BUSY_OVER_S) / 100)
        try:
            run = run_size(
                sweep.recipe, planned, settings=settings, starter=starter,
                threads=_threads_of(sweep, cell.num_ranks),
                directory=folder / f"run-{planned.round}-{cell.num_ranks}",
                with_environment=all(run.ranks != cell.num_ranks for run in sweep.runs), keep=sweep.place.keep,
            )  # fmt: skip
        except HpctrainError as error:
            if settings.cores is None or isinstance(error, StoppedEarly):
                raise
            sweep.failed.append(FailedSplit(ranks=cell.num_ranks, exit_code=error.exit_code))
            if len(sweep.failed) == len(settings.ranks):
                raise
            _say(f"{name} is not measured further: {error}")
            continue
        if settings.cores is not None:
            _check_cpus(run)
        check_samples([*sweep.runs, run], mode=settings.mode)
        sweep.runs.append(run)
        write_scaling_document(sweep.place.document, sweep.document())
        taken_s = time.monotonic() - began_s
        left_s = taken_s / (number + 1) * (len(left) - number - 1)
        _say(
            f"run {len(sweep.runs)}/{total} (round {planned.round + 1}/{settings.repeats}): {name}, "
            f"global batch {cell.global_batch}: {run.samples_per_s:,.0f} samples/s; about {in_words(left_s)} left"
        )


def _check_cpus(run: ScalingRun) -> None:
    """Raises UsageError if the ranks of a split did not compute on CPUs."""
    devices = [rank["device"] for rank in (run.environment or {}).get("ranks", ())]
    others = [device for device in devices if device != "cpu"]
    if others:
        raise UsageError(
            f"--split-cores: the ranks computed on {others[0]}, and the number of GPUs decides how many ranks a node "
            "should have: start one rank for each GPU; to compare splits on CPUs, add --set run.device=cpu"
        )


def _say(text: str) -> None:
    print(f"hpctrain bench scaling: {text}", file=sys.stderr, flush=True)
