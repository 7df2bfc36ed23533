"""Writes a run's recipe, numbers and summary into an MLflow tracking store."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError, UsageError
from hpctrain.report.run_data import Record, RunData, read_run
from hpctrain.run import read_recipe_document
from hpctrain.telemetry import read_records, scalars_of

STORE = "mlflow.db"  # in the run directory
# The limits of one request (mlflow.org, REST API, "Log Batch").
_METRICS_A_BATCH, _PARAMS_A_BATCH = 1000, 100
_LONGEST_PARAM, _LONGEST_TAG = 6000, 5000

_RUN_TAG = "hpctrain.run"  # identifies an earlier export of the same run
_UNTIL_TAG = "hpctrain.exported_until"  # time of the newest record in the store
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}
# Otherwise a server that refuses would be asked for minutes.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """The result of an export.

    Attributes:
        new: True if the store did not have this run before.
        num_values: The number of metric values that this export sent.
        uri: The address of the store, without a password.
    """

    run_id: str
    experiment: str
    uri: str
    new: bool
    num_values: int


def export_to_mlflow(
    directory: Path, *, uri: str | None = None, experiment: str = "hpctrain", name: str | None = None
) -> ExportedRun:
    """Writes the run in `directory` to an MLflow tracking store. A later call adds what is new since the last call.

    uri: the address of the store or server; None: an SQLite file in the run directory. name: the name of the run; None:
    `run.name`. Raises UsageError if `directory` is not a run directory or MLflow is not installed; LaunchError if the
    store refuses.
    """
    run = read_run(directory)
    recipe = _flat(read_recipe_document(directory / "recipe.toml"))
    records = _newest_records(run)
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)
    try:
        import mlflow.exceptions
        import sqlalchemy.exc
    except ImportError as error:
        raise UsageError(f"MLflow is not installed ({error}): pip install 'hpctrain[mlflow]'") from error
    logging.getLogger("alembic").setLevel(logging.WARNING)
    where = f"sqlite:///{directory.resolve() / STORE}" if uri is None else uri
    # Files that a user adds to the run belong next to the store, not in the working directory.
    artifacts = (directory.resolve() / "mlflow-artifacts").as_uri() if uri is None else None
    try:
        client = mlflow.MlflowClient(where)
        known = client.get_experiment_by_name(experiment)
        if known is None:
            experiment_id = client.create_experiment(experiment, artifact_location=artifacts)
        else:
            experiment_id = known.experiment_id
        logged, new = _logged_run(run, client, experiment_id=experiment_id, name=name, recipe=recipe)
        num_values = _update(run, client, logged, recipe=recipe, records=records)
    except (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        raise LaunchError(
            f"MLflow at {_shown(where)} does not take the run: {_shown(str(error))}\nThe run's own records in "
            f"{directory} are complete: when MLflow answers again, the same command writes what is missing"
        ) from error
    return ExportedRun(
        run_id=logged.info.run_id, experiment=experiment, uri=_shown(where), new=new, num_values=num_values
    )


def _shown(text: str) -> str:
    """Returns `text` without user names and passwords in addresses."""
    return re.sub(r"(?<=//)[^/@\s]+@", "", text)


def _logged_run(
    run: RunData, client: Any, *, experiment_id: str, name: str | None, recipe: Mapping[str, str]
) -> tuple[Any, bool]:
    """Returns MLflow's run for this run, and whether it was created now."""
    # Distinguishes this run from others, also when its directory is moved.
    identity = f"{_began(run):.6f} on {run.starts[0]['environment']['ranks'][0]['host']}"
    asked = f"tags.`{_RUN_TAG}` = '{identity}'"
    found = client.search_runs([experiment_id], filter_string=asked, max_results=1)
    if found:
        if name is not None:
            client.update_run(found[0].info.run_id, name=name)
        return found[0], False
    made = client.create_run(
        experiment_id, start_time=_milliseconds(_began(run)), tags={_RUN_TAG: identity},
        run_name=name or recipe["run.name"],
    )  # fmt: skip
    return made, True


def _update(
    run: RunData, client: Any, logged: Any, *, recipe: Mapping[str, str], records: Sequence[Record]
) -> int:
    """Writes what MLflow's run lacks. Returns the number of metrics sent."""
    from mlflow.entities import Metric, Param, RunTag

    run_id, params, tags = logged.info.run_id, logged.data.params, logged.data.tags
    since = float(tags.get(_UNTIL_TAG, "-inf"))
    metrics = [
        Metric(_name(name), value, _milliseconds(record["time"]), record["step"])
        for record in records
        if record["time"] > since
        for name, value in scalars_of(record).items()
    ]
    until = max((float(record["time"]) for record in records), default=_began(run))
    if run.summary is not None:  # its values are sent again each time; the store knows them then
        step = int(run.summary["step"])
        metrics += [
            Metric(f"summary/{_name(name)}", float(value), _milliseconds(until), step)
            for name, value in _flat(run.summary).items()
            if _is_number(value)
        ]
    # MLflow does not change a param: what differs from an earlier start's is a tag.
    fresh = [Param(key, value) for key, value in recipe.items() if key not in params]
    changed = {
        f"changed.{key}": value
        for key, value in recipe.items()
        if params.get(key, value) != value or f"changed.{key}" in tags
    }
    for batch in _batches(fresh, _PARAMS_A_BATCH):
        client.log_batch(run_id, params=batch)
    for batch in _batches(metrics, _METRICS_A_BATCH):
        client.log_batch(run_id, metrics=batch)
    # After the metrics: an export that was cut short is repeated.
    every = [RunTag(key, value[:_LONGEST_TAG]) for key, value in {**_tags(run), **changed}.items()]
    for batch in _batches([*every, RunTag(_UNTIL_TAG, repr(until))], _PARAMS_A_BATCH):
        client.log_batch(run_id, tags=batch)
    if run.summary is None:
        client.update_run(run_id, status="RUNNING")
    else:
        status = _STATUS[str(run.summary["status"])]
        client.set_terminated(run_id, status=status, end_time=_milliseconds(until))
    return len(metrics)


def _began(run: RunData) -> float:
    if not run.starts:
        raise UsageError(f"{run.directory} has no starts.jsonl: training has not begun yet")
    return float(run.starts[0]["time"])


def _newest_records(run: RunData) -> list[Record]:
    """Returns rank 0's records that have numbers; for repeated steps the later ones."""
    path = run.directory / "metrics" / "rank-00000.jsonl"
    newest: dict[tuple[str, int], Record] = {}
    try:
        for record in read_records(path):
            if scalars_of(record):
                newest[record["kind"], record["step"]] = record
    except (OSError, ValueError) as error:
        raise UsageError(f"the records in {path} cannot be read: {error}") from error
    return list(newest.values())


def _name(text: str) -> str:
    """Returns `text` without the characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tags(run: RunData) -> dict[str, str]:
    environment = run.environment
    found = {
        "hpctrain.directory": str(run.directory.resolve()),
        "hpctrain.version": environment.get("hpctrain"),
        "hpctrain.status": run.status,
        "hpctrain.starts": len(run.starts),
        "hpctrain.jobs": " ".join(run.jobs()),
        "hpctrain.hosts": " ".join(dict.fromkeys(str(rank["host"]) for rank in environment["ranks"])),
        "hpctrain.topology": environment.get("topology"),
        "hpctrain.algorithm": environment.get("algorithm"),
        "hpctrain.wire": environment.get("wire"),
        "mlflow.source.git.commit": environment.get("commit"),
        "mlflow.source.name": str(run.directory.resolve() / "recipe.toml"),
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _flat(document: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Returns the values of nested tables by dotted key, lists as JSON."""
    found: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= _flat(value, prefix=f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = (value if isinstance(value, str) else json.dumps(value))[
                :_LONGEST_PARAM
            ]
    return found


def _batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _milliseconds(time: float) -> int:
    return round(time * 1000)
