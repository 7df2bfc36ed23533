"""Writes a job's batch script from a template. Pure, but for reading the template's file."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2

from hpctrain.errors import RecipeError
from hpctrain.run import SlurmSection

TEMPLATE = "job.sbatch.j2"
TEMPLATE_VARIABLE = "HPCTRAIN_SLURM_TEMPLATE"
_BARE = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
_BARE_WORD = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """What a script is written from.

    name: of the job. about: lines of its first comment. recipe: path; None: the script takes it as its first argument
    (`ready` is its file name then). overrides: `--set` of all tasks. python: environment of the ranks. record: file to
    which a job adds its successors. stop_signal: asks the ranks to stop; srun and mpirun pass on these two.
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


def render_script(job: JobScript, *, template: Path | None = None) -> str:
    """Returns the text of the batch script.

    template: a site's own; it may extend hpctrain's, `job.sbatch.j2`, and replace its blocks.
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
    """Returns the overrides (`section.key=value`) of each combination of the sweep, by number; [] without a sweep."""
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
    """Returns a value, or a whole `--name=value`, as it is written behind `#SBATCH`: quoted where Slurm needs it."""
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    name, equals, rest = text.partition("=")
    if equals and name.startswith("--"):
        return f"{name}={option_text(rest)}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _launch(slurm: SlurmSection, *, ready: bool) -> str:
    """Returns what starts the ranks, up to `hpctrain`."""
    words = []
    if slurm.launcher == "supervise":
        words.append('hpctrain supervise -n "$ranks" --')
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
    """`/data` as `/data:/data`, which pyxis wants."""
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]


def _train(job: JobScript) -> str:
    recipe = '"$recipe"' if job.recipe is None else shlex.quote(str(job.recipe))
    return " ".join([recipe, *([_set_words(job.overrides)] if job.overrides else [])])


def _set_words(overrides: Sequence[str]) -> str:
    return " ".join(f"--set {shlex.quote(override)}" for override in overrides)


def _override_value(value: Any) -> str:
    """Returns a value of the sweep as `--set` reads it: TOML, or a bare word."""
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
