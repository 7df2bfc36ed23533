"""The schema of the recipe's section [slurm]."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpctrain.run.recipe.sections import RecipeSection

# Options of sbatch that have a key of their own here; `options` may not set them a second time.
KEY_OF_OPTION = {
    "--nodes": "nodes", "--ntasks-per-node": "tasks_per_node", "--cpus-per-task": "cpus_per_task",
    "--gpus-per-node": "gpus_per_task", "--time": "time", "--time-min": "time_min", "--partition": "partition",
    "--account": "account", "--qos": "qos", "--constraint": "constraint", "--reservation": "reservation",
    "--dependency": "dependency", "--mail-user": "mail_user", "--mail-type": "mail_type", "--array": "array",
    "--output": "output", "--signal": "stop_before_s", "--requeue": "on_stop", "--no-requeue": "on_stop",
    "--ntasks": "tasks_per_node", "--job-name": "run.name",
}  # fmt: skip


def _word(text: str) -> str:
    if not text.isprintable() or len(text.split()) != 1:
        raise ValueError(f"found {text!r}: must be one word, without spaces")
    return text


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"found {text!r}: must be one line of text")
    return text


def _variable(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is None:
        raise ValueError(f"{text!r} is not the name of an environment variable")
    return text


def _swept_key(text: str) -> str:
    if re.fullmatch(r"\w+(\.\w+)+", text) is None:
        raise ValueError(f"{text!r} is not a key of the recipe: write SECTION.KEY, such as optimizer.lr")
    if text.startswith("slurm.") or text == "run.directory":
        raise ValueError(
            f"{text} cannot differ between the tasks of an array: settings of Slurm apply to all of them, and each "
            "task gets a run directory of its own. Remove it from the sweep"
        )
    return text


def _minutes(value: object) -> object:
    return str(value) if type(value) is int else value


_Time = Annotated[str, BeforeValidator(_minutes)]
_Word = Annotated[str, AfterValidator(_word)]
_Line = Annotated[str, AfterValidator(_line)]
_Variable = Annotated[str, AfterValidator(_variable)]
_SweptKey = Annotated[str, AfterValidator(_swept_key)]
_TIME = re.compile(
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?|(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"
    r"|(?P<days>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
)
_ARRAY = r"^\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?$"


class SlurmSection(RecipeSection):
    """The batch job that `hpctrain slurm` makes of the recipe, see guides/slurm.md. `hpctrain train` ignores it."""

    nodes: int = Field(1, ge=1, description="Number of nodes.")
    tasks_per_node: int = Field(1, ge=1, description="Ranks on each node.")
    cpus_per_task: int = Field(1, ge=1, description="Cores of each rank.")
    gpus_per_task: int | None = Field(
        None, ge=1, description="GPUs for each rank. All ranks of a node see its GPUs; each takes its own."
    )
    time: _Time = Field(
        "01:00:00", description="Time limit, as Slurm writes it: `30` (minutes), `HH:MM:SS`, `DAYS-HH:MM:SS`."
    )
    time_min: _Time | None = Field(
        None, description="Shortest time limit that Slurm may choose instead, to start the job earlier."
    )
    stop_before_s: int = Field(
        120, ge=1, le=65535,
        description="How long before the time limit the ranks are asked to save and stop, s. One step and one save "
        "must fit in. Slurm may ask up to 60 s earlier.",
    )  # fmt: skip
    on_stop: Literal["requeue", "successor", "end"] = Field(
        "requeue",
        description="What the job does once the ranks have stopped with their state saved. `requeue`: it queues itself "
        "again. `successor`: it submits another job, for sites that forbid requeueing. `end`: nothing.",
    )
    max_restarts: int = Field(
        20, ge=0, description="How often the job may queue itself again, or how many successors it may have."
    )
    shrinkable: bool = Field(
        False, description="Whether `hpctrain slurm resize` can give back nodes of the running job."
    )
    partition: _Word | None = Field(None, description="Partition, or several separated by commas.")
    account: _Word | None = Field(None, description="Account that is charged.")
    qos: _Word | None = Field(None, description="Quality of service.")
    constraint: _Line | None = Field(None, description="Features that the nodes must have.")
    reservation: _Word | None = Field(None, description="Reservation.")
    dependency: _Word | None = Field(None, description="Jobs to wait for, such as `afterok:1234`.")
    mail_user: _Word | None = Field(None, description="Address for Slurm's mails.")
    mail_type: list[_Word] = Field(
        ["END", "FAIL"], min_length=1, description="`mail_user`: events that cause a mail."
    )
    array: str | None = Field(
        None, pattern=_ARRAY,
        description="Indexes of a job array, such as `0-7%2` (two at a time). Each task is a run of its own, in "
        "`task-INDEX` of the run directory. Without `sweep`, its index is `run.seed`; with it, the number of the "
        "combination.",
    )  # fmt: skip
    sweep: dict[_SweptKey, list[Any]] = Field(
        default_factory=dict,
        description='Keys of the recipe and values to try, such as `{ "optimizer.lr" = [0.1, 0.01] }`: a job array '
        "with one task for each combination, or for those in `array`.",
    )
    output: _Line | None = Field(
        None,
        description="File of the job's output. Default: `slurm-%x-%j.out`, of an array `slurm-%x-%A_%a.out`.",
    )
    modules: list[_Word] = Field([], description="Modules to load.")
    setup: list[_Line] = Field([], description="Shell lines that the script runs before it starts the ranks.")
    environment: dict[_Variable, str] = Field(
        default_factory=dict, description="Environment variables of the ranks. They are recorded: no secrets."
    )
    python: _Line | None = Field(
        None, description="Python environment of the ranks. Default: the one that `hpctrain slurm` runs in."
    )
    python_archive: _Line | None = Field(
        None,
        description="An archive of `hpctrain stage-environment`, which the job unpacks on each node's own disk.",
    )
    launcher: Literal["srun", "mpirun", "supervise"] = Field(
        "srun",
        description="What starts the ranks. `supervise`: srun, again after a lost rank or node; see "
        "guides/supervise.md.",
    )
    spares: int = Field(
        0,
        ge=0,
        description="`supervise`: how many of the nodes are kept free, to take the place of a lost one.",
    )
    elastic: str | None = Field(
        None,
        pattern=r"^[1-9]\d*:[1-9]\d*$",
        description="`supervise`: `MIN:MAX`, the range of the number of ranks. The run continues with fewer ranks "
        "after a lost node, and with more when the node is back; see guides/elastic.md.",
    )
    mpi: _Word = Field(
        "pmix", description="`srun`: the value of its --mpi. `pmix` for Open MPI, `pmi2` for MPICH."
    )
    container: _Line | None = Field(None, description="Container image in which the ranks run.")
    container_runtime: Literal["apptainer", "pyxis"] = Field(
        "apptainer", description="`container`: what runs it. `pyxis`: srun's plugin for enroot."
    )
    container_mounts: list[_Word] = Field(
        [], description="`container`: paths that it sees, such as `/data` or `/data:/mnt`."
    )
    options: list[_Line] = Field(
        [], description="Further options of sbatch, such as `--mem=0` or `--exclusive`."
    )
    template: _Line | None = Field(
        None,
        description="Jinja2 template of the script. Default: the file that HPCTRAIN_SLURM_TEMPLATE names, or else "
        "hpctrain's own.",
    )

    @property
    def num_ranks(self) -> int:
        return (self.nodes - self.spares) * self.tasks_per_node

    @property
    def _is_pyxis_without_srun(self) -> bool:
        return self.container_runtime == "pyxis" and self.launcher != "srun"

    @model_validator(mode="after")
    def _fits_together(self) -> SlurmSection:
        limit_s = seconds_of(self.time, key="time")
        if self.time_min is not None:
            shortest_s = seconds_of(self.time_min, key="time_min")
            if shortest_s > limit_s:
                raise ValueError(f"time_min = {self.time_min!r} is longer than time = {self.time!r}")
            limit_s = shortest_s
        if self.stop_before_s >= limit_s:
            raise ValueError(
                f"stop_before_s = {self.stop_before_s} leaves no time to train in a job of {limit_s} s: lower it, or "
                "raise the time limit"
            )
        for option in self.options:
            name = option.partition("=")[0]
            if not re.fullmatch(r"--[a-z][a-z-]*", name):
                raise ValueError(f"options: write {option!r} as --NAME or --NAME=VALUE")
            if name in KEY_OF_OPTION:
                raise ValueError(f"options: {name} is set by the key {KEY_OF_OPTION[name]}")
        if self.container is not None and (self.launcher == "supervise" or self._is_pyxis_without_srun):
            raise ValueError(f"launcher = {self.launcher!r} cannot start ranks in this container: set 'srun'")
        if self.launcher == "supervise" and self.shrinkable:
            raise ValueError(
                "shrinkable: with launcher = 'supervise' a job keeps its nodes, so leave shrinkable out"
            )
        if self.spares and (self.launcher != "supervise" or self.spares >= self.nodes):
            raise ValueError(
                "spares must be fewer than nodes, and are possible only with launcher = 'supervise'"
            )
        if self.elastic is not None:
            self._check_elastic(*map(int, self.elastic.split(":")))
        if self.container is None and self.container_mounts:
            raise ValueError("container_mounts needs container")
        if self.container is not None and (self.python or self.python_archive):
            raise ValueError(
                "with container, the ranks use the container's Python: leave out python, python_archive"
            )
        empty = [key for key, values in self.sweep.items() if not values]
        if empty:
            raise ValueError(f"sweep: {', '.join(empty)} has no values")
        if self.sweep and self.array is not None:
            largest = max(
                int(part.partition(":")[0].rpartition("-")[2])
                for part in self.array.partition("%")[0].split(",")
            )
            combinations = math.prod(len(values) for values in self.sweep.values())
            if largest >= combinations:
                raise ValueError(
                    f"array = {self.array!r}, but sweep has {combinations} combinations: give task numbers "
                    f"from 0 to {combinations - 1}"
                )
        return self

    def _check_elastic(self, least: int, most: int) -> None:
        slots = self.nodes * self.tasks_per_node
        if self.launcher != "supervise":
            raise ValueError("elastic needs launcher = 'supervise', which starts the ranks again")
        if self.spares:
            raise ValueError(
                "elastic: nodes beyond those that MAX ranks need are spares, so leave spares out"
            )
        if not least <= most <= slots:
            raise ValueError(
                f"elastic = {self.elastic!r}: MIN must be at most MAX, and MAX at most nodes x tasks_per_node = {slots}"
            )


def seconds_of(text: str, *, key: str) -> int:
    """Returns a time limit in seconds. Raises ValueError if the text is not one of Slurm's forms."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{key} = {text!r} is not a time limit: write minutes, HH:MM:SS, or DAYS-HH:MM:SS")
    part = {name: int(value) for name, value in match.groupdict(default="0").items()}
    minutes = part["minutes"] + part["m"] + part["dm"] + 60 * (part["h"] + part["dh"] + 24 * part["days"])
    return 60 * minutes + part["seconds"] + part["s"] + part["ds"]
