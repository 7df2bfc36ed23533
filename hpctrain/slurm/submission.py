"""Plans the job of a recipe, and writes the batch script. Submits and ends the job."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import jinja2

from hpctrain.errors import LaunchError, RecipeError, UsageError
from hpctrain.launch import SlurmController, SlurmUnavailable
from hpctrain.run import Recipe, SlurmSection, load_recipe
from hpctrain.slurm.jobs import (
    FOLDER,
    Job,
    Submission,
    queued_jobs,
    record_path,
    record_submission,
    recorded_ids,
)

TEMPLATE = "job.sbatch.j2"
TEMPLATE_VARIABLE = "HPCTRAIN_SLURM_TEMPLATE"
_BARE = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
_BARE_WORD = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """The values from which a batch script is rendered.

    name: name of the job.
    about: lines of the first comment.
    settings: the recipe's section [slurm].
    recipe: path of the recipe; None if the script takes the path as its first argument.
    run_directory: the recipe's run directory.
    overrides: `--set` options of all tasks.
    python: folder of the ranks' Python environment; None if the script does not select an environment.
    record: file to which a job's script adds the next job, which continues the run.
    ready: file name of the script if it takes the recipe as an argument; otherwise None.
    stop_signal: signal that asks the ranks to stop: USR1 or USR2, the only signals that srun and mpirun forward.
    acts: True if the run may ask for another number of nodes (`scaling.act`).
    """

    name: str
    about: Sequence[str]
    settings: SlurmSection
    recipe: Path | None
    run_directory: str
    overrides: Sequence[str] = ()
    python: Path | None = None
    record: Path | None = None
    ready: str | None = None
    stop_signal: Literal["USR1", "USR2"] = "USR1"
    acts: bool = False


def render_script(job: JobScript, *, template: Path | None = None) -> str:
    """Returns the text of the batch script.

    template: the site's own template, which may extend hpctrain's template `job.sbatch.j2` and replace its blocks;
    None: hpctrain's template.

    Raises RecipeError if the template cannot be read or is faulty.
    """
    slurm = job.settings
    restarts: object = slurm.max_restarts
    if job.ready is not None:
        restarts = f"${{HPCTRAIN_MAX_REQUEUES:-{restarts}}}"
    combinations = sweep_points(slurm)
    array = slurm.array or (f"0-{len(combinations) - 1}" if combinations else None)
    values = {
        "name": job.name,
        "about": job.about,
        "slurm": slurm.model_dump(),
        "ready": job.ready,
        "output": slurm.output or ("slurm-%x-%A_%a.out" if array else "slurm-%x-%j.out"),
        "array": array,
        "points": [_set_words(overrides) for overrides in combinations],
        "python": job.python,
        "record": job.record,
        "acts": job.acts and job.record is not None and not array,
        "run_directory": job.run_directory if job.recipe is None else shlex.quote(job.run_directory),
        "max_restarts": restarts,
        "spares": slurm.spares if job.ready is None else f"${{HPCTRAIN_SPARES:-{slurm.spares}}}",
        "stop_signal": job.stop_signal,
        "stopped": "not finished" if slurm.launcher == "supervise" else "stopped with the state saved",
        "launch": _launch(slurm, ready=job.ready is not None),
        "train": _train(job),
    }  # fmt: skip
    environment = _environment(template)
    try:
        if template is None:
            source = environment.get_template(TEMPLATE)
        else:
            source = environment.from_string(template.read_text(encoding="utf-8"))
        text = source.render(values)
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        where = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise RecipeError(f"the template {template or TEMPLATE} cannot be used{where}: {error}") from error
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def sweep_points(slurm: SlurmSection) -> list[list[str]]:
    """Returns the overrides (`section.key=value`) of each combination of the sweep, in order; [] without a sweep."""
    if not slurm.sweep:
        return []
    tried = [[f"{key}={_override_value(value)}" for value in values] for key, values in slurm.sweep.items()]
    return [list(combination) for combination in itertools.product(*tried)]


def _environment(template: Path | None) -> jinja2.Environment:
    # hpctrain's first: a site's template of the same name extends it, not itself.
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("hpctrain.slurm", "templates")]
    if template is not None:
        loaders.append(jinja2.FileSystemLoader(template.parent))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["option"] = option_text
    return environment


def option_text(value: object) -> str:
    """Returns a value, or a whole `--name=value`, as text for an `#SBATCH` line, quoted where Slurm needs it."""
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    name, equals, rest = text.partition("=")
    if equals and name.startswith("--"):
        return f"{name}={option_text(rest)}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _launch(slurm: SlurmSection, *, ready: bool) -> str:
    """Returns the words that start the ranks, up to the word `hpctrain`."""
    words = []
    if slurm.launcher == "supervise":
        number = '-n "$ranks"' if slurm.elastic is None else f"--elastic {slurm.elastic}"
        words.append(f"hpctrain supervise {number} --")
    elif slurm.launcher == "mpirun":
        words += ["mpirun", '-n "$SLURM_NTASKS"']
    else:
        words += [
            "srun",
            '--mpi="${HPCTRAIN_MPI_TYPE:-pmix}"' if ready else f"--mpi={slurm.mpi}",
            "--wait=30",
        ]
    if slurm.container is not None:
        image = shlex.quote(slurm.container)
        if slurm.container_runtime == "pyxis":
            mounts = "".join(f",{shlex.quote(mount)}" for mount in _pairs(slurm.container_mounts))
            words += [
                f"--container-image={image}",
                f'--container-mounts="$PWD:$PWD"{mounts}',
                '--container-workdir="$PWD"',
            ]
        else:
            words += ["apptainer exec", *(["--nv"] if slurm.gpus_per_task else []), '--bind "$PWD"']
            words += [f"--bind {shlex.quote(mount)}" for mount in slurm.container_mounts]
            words.append(image)
    return " ".join(words)


def _pairs(mounts: Sequence[str]) -> list[str]:
    """Returns mounts such as `/data` as `/data:/data`, the form that pyxis needs."""
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]


def _train(job: JobScript) -> str:
    recipe = '"$recipe"' if job.recipe is None else shlex.quote(str(job.recipe))
    return " ".join([recipe, *([_set_words(job.overrides)] if job.overrides else [])])


def _set_words(overrides: Sequence[str]) -> str:
    return " ".join(f"--set {shlex.quote(override)}" for override in overrides)


def _override_value(value: Any) -> str:
    """Returns a value of the sweep in the form that `--set` accepts: TOML, or a bare word."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_override_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_override_value(item) for item in value) + "]"
    if (
        isinstance(value, str)
        and _BARE_WORD.fullmatch(value)
        and value not in ("true", "false", "inf", "nan")
    ):
        return value
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


# Plans the job of a recipe, submits it, and ends it.


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job that is ready to submit.

    recipe_path: path of the recipe, as the script names it.
    overrides: `--set` options.
    folder: folder in which sbatch is called; the recipe's paths are relative to this folder.
    text: text of the batch script.
    """

    recipe: Recipe
    recipe_path: Path
    overrides: tuple[str, ...]
    folder: Path
    text: str

    @property
    def run_directory(self) -> Path:
        return self.folder / self.recipe.run.directory

    @property
    def is_array(self) -> bool:
        return bool(self.recipe.slurm.array or self.recipe.slurm.sweep)

    def describe(self) -> str:
        """Returns a text such as `4 nodes x 2 ranks`."""
        nodes, ranks = self.recipe.slurm.nodes, self.recipe.slurm.tasks_per_node
        return f"{nodes} node{'s' * (nodes > 1)} x {ranks} rank{'s' * (ranks > 1)}"


def plan_job(
    recipe_path: Path,
    *,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedJob:
    """Reads a recipe and plans its job, including the text of its batch script. Does not ask Slurm.

    overrides: options `section.key=value`; options of [slurm] apply to the job, and all other options are passed to the
    ranks.
    folder: folder in which sbatch will be called; None: the working directory of this process.

    Raises RecipeError or LaunchError if the recipe and the job contradict each other.
    """
    folder = Path.cwd() if folder is None else folder
    recipe = load_recipe(folder / recipe_path, overrides=overrides)
    _check(recipe, recipe_path)
    slurm = recipe.slurm
    for number, point in enumerate(sweep_points(slurm)):
        try:
            load_recipe(folder / recipe_path, overrides=[*overrides, *point])
        except RecipeError as error:
            raise RecipeError(f"slurm.sweep, combination {number} ({', '.join(point)}): {error}") from error
    if sweep_points(slurm) or slurm.array:
        _check_array(recipe)
    of_ranks = [override for override in overrides if not override.startswith("slurm.")]
    template = slurm.template or environ.get(TEMPLATE_VARIABLE) or None
    job = JobScript(
        name=recipe.run.name,
        about=[
            f"Trains {recipe_path}. Written by `hpctrain slurm`, from the recipe's section [slurm].",
        ],
        settings=slurm,
        recipe=recipe_path,
        run_directory=recipe.run.directory,
        overrides=of_ranks,
        python=_python(slurm, folder=folder),
        record=record_path(Path(recipe.run.directory)),
        stop_signal=_stop_signal(recipe),
        acts=recipe.scaling.act,
    )
    text = render_script(job, template=None if template is None else folder / template)
    return PlannedJob(
        recipe=recipe, recipe_path=recipe_path, overrides=tuple(overrides), folder=folder, text=text
    )


def submit_job(
    planned: PlannedJob,
    controller: SlurmController,
    *,
    by: str = "submit",
    arguments: Sequence[str] = (),
    dependency: str | None = None,
    reason: str = "",
) -> Submission:
    """Writes the script into the run directory, submits the script, and records the job in the run directory.

    by: what submitted the job, see `Submission`.
    arguments: options of `hpctrain train` for this job alone, such as `--resume never`.
    dependency: Slurm dependency that replaces that of the recipe; None: the recipe's dependency.
    reason: why the job is submitted, for the record.

    Raises LaunchError if Slurm does not accept the job.
    """
    place = planned.run_directory / FOLDER
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    script = place / f"{now}-{uuid.uuid4().hex[:4]}.sbatch"
    try:
        place.mkdir(parents=True, exist_ok=True)
        script.write_text(planned.text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the job's script cannot be written to {script}: {error.strerror}") from error
    options = [] if dependency is None else [f"--dependency={dependency}"]
    try:
        answer = controller.ask(
            ["sbatch", "--parsable", *options, str(script), *arguments],
            cwd=planned.folder,
            done_before=lambda: _find_by_script(controller, script),
        )
    except SlurmUnavailable as error:
        raise SlurmUnavailable(
            f"{error}. Look at `squeue --me` first: Slurm may have accepted the job"
        ) from error
    except LaunchError:
        script.unlink(missing_ok=True)
        raise
    submission = Submission(
        job_id=answer.strip().splitlines()[-1].partition(";")[0],
        by=by,
        script=str(script),
        recipe=str(planned.recipe_path),
        overrides=planned.overrides,
        folder=str(planned.folder),
        nodes=planned.recipe.slurm.nodes,
        tasks_per_node=planned.recipe.slurm.tasks_per_node,
        is_array=planned.is_array,
        is_shrinkable=planned.recipe.slurm.shrinkable,
        reason=reason,
    )
    try:
        record_submission(planned.run_directory, submission)
    except OSError as error:
        raise LaunchError(
            f"job {submission.job_id} is submitted, but cannot be recorded in {place}: {error.strerror}"
        ) from error
    return submission


def check_job(planned: PlannedJob, controller: SlurmController) -> str:
    """Makes Slurm check the job without submitting it. Returns Slurm's answer, which has the estimated start time.

    Raises LaunchError if Slurm refuses the job.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-slurm-") as folder:
        script = Path(folder, "job.sbatch")
        script.write_text(planned.text, encoding="utf-8")
        words = ["sbatch", "--test-only", str(script)]
        return controller.ask(words, cwd=planned.folder, stream="stderr").strip()


def active_jobs(run_directory: Path, controller: SlurmController) -> list[Job]:
    """Returns the jobs of a run that are waiting or running. Raises LaunchError."""
    return [job for job in queued_jobs(controller, recorded_ids(run_directory)) if not job.ended]


def check_idle(planned: PlannedJob, controller: SlurmController) -> None:
    """Raises UsageError if a job of this run is waiting or running: two jobs would write to the same run directory."""
    active = active_jobs(planned.run_directory, controller)
    if active:
        raise UsageError(
            f"job {active[0].job_id} of {planned.recipe.run.directory} is {active[0].state}: wait for it, end it with "
            "`hpctrain slurm cancel`, or give this run a directory of its own (--set run.directory=...)"
        )


def stop_jobs(jobs: Sequence[Job], controller: SlurmController) -> None:
    """Removes waiting jobs from the queue, and asks the ranks of running jobs to save and stop.

    The running jobs are not requeued.
    """
    waiting = [job.job_id for job in jobs if job.waits]
    running = [job.job_id for job in jobs if not job.waits]
    if waiting:
        kill_jobs(waiting, controller)
    if running:
        # SIGTERM goes only to the script, which then does not requeue the job.
        controller.ask(["scancel", "--batch", "--signal=TERM", *running])
        ask_to_stop(running, controller)


def ask_to_stop(job_ids: Sequence[str], controller: SlurmController) -> None:
    """Asks the ranks of running jobs to save and stop. Each job's script decides what happens afterwards."""
    controller.ask(["scancel", "--batch", "--signal=USR1", *job_ids])


def kill_jobs(job_ids: Sequence[str], controller: SlurmController) -> None:
    """Cancels jobs. The ranks have time to save until Slurm kills them, after Slurm's KillWait of usually 30 s."""
    controller.ask(["scancel", *job_ids])


def _find_by_script(controller: SlurmController, script: Path) -> str | None:
    """Returns the id of the job with the batch script `script`, whose name is unique; None if there is none."""
    lines = controller.ask(["squeue", "--me", "--noheader", "--states=all", "--format=%F|%o"]).splitlines()
    found = (line.partition("|") for line in lines)
    return next((job_id for job_id, _, command in found if command.startswith(str(script))), None)


def _check(recipe: Recipe, recipe_path: Path) -> None:
    slurm = recipe.slurm
    if "slurm" not in recipe.model_fields_set:
        raise RecipeError(
            f"{recipe_path} has no section [slurm]: add one with nodes, tasks_per_node and time, or set them with "
            "--set slurm.nodes=2"
        )
    if recipe.run.ranks is not None and recipe.run.ranks != slurm.num_ranks:
        raise RecipeError(
            f"run.ranks = {recipe.run.ranks}, but [slurm] starts {slurm.num_ranks} (nodes = {slurm.nodes}, "
            f"tasks_per_node = {slurm.tasks_per_node}): change one of them"
        )
    if recipe.data.global_batch < slurm.num_ranks:
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split over the {slurm.num_ranks} ranks of "
            "[slurm]: every rank needs at least one sample"
        )


def _check_array(recipe: Recipe) -> None:
    if recipe.checkpoint.directory is not None:
        raise RecipeError(
            "checkpoint.directory would be the same for all tasks of the array, which would resume from each other's "
            "checkpoints: leave it out; each task's checkpoints are in its own run directory"
        )


def _stop_signal(recipe: Recipe) -> Literal["USR1", "USR2"]:
    """Returns the signal that the script sends to srun or mpirun to stop the ranks, one that these forward.

    Raises RecipeError if the recipe's `stop.signals` has no such signal.
    """
    if "SIGUSR1" in recipe.stop.signals:
        return "USR1"
    if "SIGUSR2" in recipe.stop.signals and recipe.slurm.launcher != "supervise":
        return "USR2"
    raise RecipeError(
        f"stop.signals are {', '.join(recipe.stop.signals)}: the job's script asks the ranks to stop by SIGUSR1 or, "
        "without launcher = 'supervise', SIGUSR2: add one of them"
    )


def _python(slurm: SlurmSection, *, folder: Path) -> Path | None:
    """Returns the folder of the ranks' Python environment; None if it is in a container or an archive."""
    if slurm.container is not None or slurm.python_archive is not None:
        return None
    if slurm.python is not None:
        prefix = folder / slurm.python
    else:
        found = Path(sys.executable).parent / "hpctrain"
        if not found.exists():
            found = Path(shutil.which("hpctrain") or found)
        prefix = found.parent.parent
    if not (prefix / "bin" / "hpctrain").exists():
        raise LaunchError(
            f"there is no hpctrain in {prefix / 'bin'}: set slurm.python to the environment where it is installed"
        )
    return prefix
