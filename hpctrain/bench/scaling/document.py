"""The JSON document of a scaling sweep, `hpctrain.bench.scaling/1`. It is also the state from which a sweep resumes.

Times are seconds, rates samples/s, `started` and `ended` seconds since 1970. A reader that only wants the results needs
`sizes` (one entry a number of ranks) and `fits`; one that computes efficiencies of its own needs `runs`, where
`by_rank` has every rank's seconds, summed over the measured steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.bench.document import document_head, write_document
from hpctrain.errors import UsageError

SCHEMA: Literal["hpctrain.bench.scaling/1"] = "hpctrain.bench.scaling/1"
Mode = Literal["strong", "weak"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class RankSums(_Part):
    """One rank in one run. samples, seconds: sums over the measured steps.

    seconds: by name as in metrics/rank-*.jsonl: `step`, and of it `input`, `compute`, `bubble`, `exposed_sync`,
    `checkpoint`; `sync`, which overlaps them, is the whole time of the reduction.
    """

    rank: int
    host: str
    node: str
    samples: int
    seconds: dict[str, float]


class ScalingRun(_Part):
    """One run: one start of the ranks.

    round: from 0; each round has one run of every size. place: its place in the round, from 0.
    samples_per_s: samples of all ranks / sum of `step_s`. step_s: of each measured step, on its slowest rank.
    samples: of all ranks and measured steps. sample_sums: of each measured step a hash of the set of samples that all
    ranks together had, 16 hexadecimal digits. by_rank: in the order of the ranks. job: Slurm's job, if the run had one
    of its own. environment: the run's environment.json; null after the first run of a size.
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
    """What was asked for. A sweep is resumed with the same, except that `repeats` may grow.

    nodes: if sizes were given as numbers of nodes. steps, warmup_steps: of each run; the warm-up comes first and is
    dropped. repeats: rounds. seed: of the order of the sizes within the rounds. threads_per_rank: of every rank, at
    every size; None before it is decided. start: `launch`: mpirun here, or srun within this allocation; `jobs`: a Slurm
    job for each run.
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
    overrides: list[str] = Field(default_factory=list)


class SizeResult(_Part):
    """The results of one number of ranks, over its runs.

    samples_per_s, step_s: `median`, `q1`, `q3`, `min`, `max`, `count`; step_s over all measured steps of all runs.
    efficiency: samples/s per rank relative to the baseline, of the same rounds: `value` (geometric mean), `low`,
    `high` (t interval at confidence `level`), `least`, `greatest` (of the rounds), `range_level`, `count`, `paired`.
    speedup: samples/s relative to the baseline, the same fields. Both 1 without an interval for the baseline itself.
    seconds: of a step, mean over ranks and runs: `input`, `compute`, `bubble`, `exposed_sync`, `checkpoint`, `other`,
    `step`.
    shared_cores: whether ranks had to share cores, so that the figures do not apply where each has its own.
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
    """What was compared of the samples that the runs had. rule: in words. runs, steps: number of runs, steps each."""

    rule: str
    runs: int
    steps: int


class ScalingDocument(_Part):
    """The whole document.

    complete: whether all rounds were measured; else `--resume` continues. recipe: every key with its value.
    baseline_ranks: the size to which efficiency and speedup are relative. fits: `chosen` (a law's name or null),
    `why`, and `laws`, each with `law`, `formula`, `rate_1`, `parameters` (`name`, `value`, `error`, `low`, `high`,
    `at_bound`), `residual`, `aicc`, `checked_by`, `misfit_p`, `peak_ranks`, `efficiency` and `predicted` (by number of
    ranks); null while fewer than two sizes were measured. runs: in the order in which they were made.
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

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


def document_start(*, commit: str | None) -> dict[str, Any]:
    """Returns the fields that describe this machine and this version. They are kept when a sweep is resumed."""
    return document_head(SCHEMA, commit=commit)


def read_scaling_document(path: Path, *, option: str = "") -> ScalingDocument:
    """Reads a document. option: what named it, for the message. Raises UsageError if it is not one."""
    named = f"{option} {path}".strip()
    try:
        return ScalingDocument.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{named} is not a document of `hpctrain bench scaling`: it is no text") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{named} is not a document of `hpctrain bench scaling`: {where}: {first['msg']}"
        ) from error


def write_scaling_document(path: Path, document: ScalingDocument) -> None:
    """Writes the document atomically. Raises UsageError if it cannot be written."""
    write_document(path, document.as_json())
