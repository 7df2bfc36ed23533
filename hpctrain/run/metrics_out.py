"""Sends a run's metrics to monitoring systems, in addition to the run's own records."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from hpctrain.comm import all_gather_json, broadcast_json
from hpctrain.distributed import group_traffic
from hpctrain.errors import RecipeError
from hpctrain.reduce import Reduction
from hpctrain.resilience import WallClock
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.recipe.sections import TelemetrySection
from hpctrain.run.session import Session
from hpctrain.telemetry import (
    ENERGY,
    INFO_LABELS,
    STEP,
    OtlpSink,
    Probe,
    PrometheusEndpoint,
    PrometheusTextFile,
    RunMetrics,
    Sinks,
    TargetsFile,
    TensorBoardSink,
    Value,
    missing_prometheus_client,
    stop_reason,
)
from hpctrain.version import __version__

# What the run directory records of earlier starts: how they ended, and how much of their work is done
# again.


_TAIL_BYTES = 1 << 20
# Causes in `attempts.jsonl` of attempts that did not fail.
_NO_FAILURES = frozenset({"finished", "wall clock", "preemption", "cancelled", "other nodes"})


def what_the_last_start_left(records: Path, *, step: int) -> dict[str, Any]:
    """Returns how the previous start of the run ended, and how much of its work this start repeats.

    For rank 0. Raises OSError.

    records: the file with the records of rank 0.
    step: the step from which this start continues.

    In the result, `stopped` is "signal", "time_limit", "scaling" or None. `lost_steps` is the number of steps that the
    previous start trained after `step`. `lost_s` is the estimated time of these steps in seconds, from the mean time of
    the steps in the last MiB of the records.
    """
    found = list(_newest(records))
    steps = [record for record in found if record["kind"] == STEP]
    last = steps[-1]["step"] if steps else step
    beyond = [record["seconds"]["step"] for record in steps if record["step"] > step] or [0.0]
    lost = max(0, last - step)
    # The last reading of the energy counters follows when the run has stopped.
    others = [record for record in found if record["kind"] != ENERGY]
    stopped = stop_reason(others[-1]["reason"]) if others and others[-1]["kind"] == "stopped" else None
    return {"stopped": stopped, "lost_steps": lost, "lost_s": lost * sum(beyond) / len(beyond)}


def figures_of_starts(
    starts: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], *, requeues: int
) -> list[Value]:
    """Returns metrics about all starts of the run, each as (name, labels, value). Pure.

    starts: the lines of `starts.jsonl`; the last line is about this start.
    attempts: the lines of `attempts.jsonl`; empty without a supervisor.
    requeues: how often Slurm has requeued the job.
    """
    before = [start.get("before") or {} for start in starts]
    stops = Counter(entry["stopped"] for entry in before if entry.get("stopped"))
    failed = Counter(a["cause"] for a in attempts if a.get("cause") and a["cause"] not in _NO_FAILURES)
    attempted = completed = len(starts) - 1
    if attempts:
        # An attempt that has not ended is this start, whose training the supervisor has not seen yet.
        earlier = attempts if attempts[-1].get("ended") is not None else attempts[:-1]
        attempted = len(earlier)
        completed = sum(a.get("training_began") is not None for a in earlier[1:]) + (attempted > 0)
    return [
        ("hpctrain_starts_total", (), len(starts)),
        ("hpctrain_resumes_attempted_total", (), attempted),
        ("hpctrain_resumes_completed_total", (), completed),
        ("hpctrain_requeues_total", (), requeues),
        ("hpctrain_lost_steps_total", (), sum(entry.get("lost_steps", 0) for entry in before)),
        ("hpctrain_lost_seconds_total", (), sum(entry.get("lost_s", 0.0) for entry in before)),
        *(("hpctrain_stops_total", (reason,), count) for reason, count in stops.items()),
        *(("hpctrain_failed_attempts_total", (cause,), count) for cause, count in failed.items()),
    ]


def read_figures_of_starts(directory: Path) -> list[Value]:
    """Returns metrics about all starts of the run in `directory`; see `figures_of_starts`. For rank 0.

    Unreadable lines of the files are skipped.
    """
    requeues = os.environ.get("SLURM_RESTART_COUNT", "")
    return figures_of_starts(
        _lines(directory / "starts.jsonl"),
        _lines(directory / "attempts.jsonl"),
        requeues=int(requeues) if requeues.isdigit() else 0,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records in the last MiB of a file, oldest first."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    # The first piece may have been cut; the last one is empty.
    for line in lines[1 if start else 0 : -1]:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


# Opens the sinks that receive a run's records besides its own files, as the section [telemetry] says.


TENSORBOARD = "tensorboard"  # folder in the run directory
# The largest number of ranks on which `telemetry.ranks = "auto"` lets every rank record its steps.
MOST_RANKS_RECORDED = 64
_ANY_ADDRESS = ("", "0.0.0.0", "::")
_LOOPBACK = ("127.", "localhost", "::1")


def records_steps(ranks: str, *, session: Session) -> bool:
    """Returns True if this rank records its steps. `ranks` is the recipe's value of `telemetry.ranks`."""
    if ranks == "auto":
        ranks = "all" if session.world_size <= MOST_RANKS_RECORDED else "node"
    return ranks == "all" or session.rank == 0 or (ranks == "node" and session.leads_node)


def check_sinks(recipe: Recipe) -> None:
    """Raises RecipeError if a package that the recipe's sinks need is not installed on this node."""
    section = recipe.telemetry
    for key, wanted, package, extra in (
        (
            "otlp_endpoint",
            section.otlp_endpoint is not None,
            "opentelemetry.exporter.otlp.proto.http",
            "otlp",
        ),
        ("tensorboard", section.tensorboard, "tensorboard", "tensorboard"),
    ):
        if wanted and not _is_installed(package):
            raise RecipeError(
                f"telemetry.{key} needs packages that are missing: pip install 'hpctrain[{extra}]'"
            )
    if recipe.telemetry.prometheus != "off" and (missing := missing_prometheus_client()) is not None:
        raise RecipeError(f"telemetry.prometheus = {recipe.telemetry.prometheus!r} {missing}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What the metrics need to know of the run besides its records.

    Attributes:
        started: The start time, in seconds since 1970.
        environment: The content of `environment.json`.
        reduction: The reduction whose sent bytes are counted; None: no reduction's bytes are counted.
        clock: The clock of the time limit, on rank 0; None on other ranks.
    """

    started: float
    environment: Mapping[str, Any]
    reduction: Reduction | None
    clock: WallClock | None


def open_sinks(sinks: Sinks, recipe: Recipe, *, session: Session, facts: RunFacts) -> None:
    """Opens the sinks by which this rank sends metrics to monitoring systems. Collective.

    A sink that cannot be opened is reported, and the run continues.
    """
    section = recipe.telemetry
    directory = Path(recipe.run.directory)
    if section.tensorboard and session.rank == 0:
        sinks.open(TensorBoardSink.name, lambda: TensorBoardSink(directory / TENSORBOARD))
    if section.prometheus == "off" and section.otlp_endpoint is None:
        return
    names = {"run": recipe.run.name, "run_id": run_id(directory)}
    names = broadcast_json(session.world, names)  # nodes may have the directory under other paths
    exposes = session.rank == 0 or (session.leads_node and records_steps(section.ranks, session=session))
    metrics = _run_metrics(recipe, names, session=session, facts=facts) if exposes else None
    endpoint = section.otlp_endpoint
    if exposes and endpoint is not None:
        mine = _run_metrics(recipe, names, session=session, facts=facts)
        resource = _resource(names, session=session)
        sinks.open(
            OtlpSink.name,
            lambda: OtlpSink(mine, endpoint=endpoint, every_s=section.otlp_every_s, resource=resource),
        )
    if section.prometheus == "endpoint":
        _open_endpoint(sinks, section, metrics, session=session, directory=directory, names=names)
    elif metrics is not None and section.prometheus_directory is not None:
        file = Path(section.prometheus_directory) / f"hpctrain-{names['run_id']}-rank-{session.rank:05}.prom"
        sinks.open(
            PrometheusTextFile.name,
            lambda: PrometheusTextFile(metrics, file, every_s=section.prometheus_every_s, labels=names),
        )


def _resource(names: Mapping[str, str], *, session: Session) -> dict[str, str]:
    """Returns OpenTelemetry's resource attributes of this process (opentelemetry.io/docs/specs/semconv/resource)."""
    return {
        "service.name": "hpctrain",
        "service.version": __version__,
        "service.namespace": names["run"],
        "service.instance.id": f"{names['run_id']}/{session.rank}",
        "host.name": socket.gethostname(),
        "hpctrain.run": names["run"],
        "hpctrain.run_id": names["run_id"],
        **({"slurm.job.id": job} if (job := _job_id()) else {}),
    }


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def run_id(directory: Path) -> str:
    """Returns a unique name of a run directory: 12 hexadecimal digits, the same for all starts of the run."""
    return xxhash.xxh3_64_hexdigest(str(directory.resolve()).encode())[:12]


def _open_endpoint(
    sinks: Sinks,
    section: TelemetrySection,
    metrics: RunMetrics | None,
    *,
    session: Session,
    directory: Path,
    names: Mapping[str, str],
) -> None:
    """Starts this rank's Prometheus endpoint, if `metrics` is not None. Collective.

    Rank 0 writes a file with the addresses of all endpoints.
    """
    address = section.prometheus_address
    mine: str | None = None
    if metrics is not None:

        def start() -> PrometheusEndpoint:
            nonlocal mine
            endpoint = PrometheusEndpoint(metrics, address=address, port=section.prometheus_port)
            host = socket.gethostname() if address in _ANY_ADDRESS else address
            mine = f"[{host}]:{endpoint.port}" if ":" in host else f"{host}:{endpoint.port}"
            return endpoint

        sinks.open(PrometheusEndpoint.name, start)
    targets = [target for target in all_gather_json(session.world, mine) if target is not None]
    if session.topology.num_nodes > 1 and address.startswith(_LOOPBACK):
        session.note(
            f"telemetry.prometheus_address = {address!r} on {session.topology.num_nodes} nodes: each endpoint can be "
            "reached from its own node only"
        )
    if session.rank == 0 and targets:
        folder = section.prometheus_targets
        path = directory / "metrics" / "prometheus" if folder is None else Path(folder)
        path = path / f"hpctrain-{names['run_id']}.json"
        sinks.open(TargetsFile.name, lambda: TargetsFile(path, targets=targets, labels=names))


def _run_metrics(
    recipe: Recipe, names: Mapping[str, str], *, session: Session, facts: RunFacts
) -> RunMetrics:
    process, clock, num_nodes = psutil.Process(), facts.clock, session.topology.num_nodes
    given: list[Value] = [
        ("hpctrain_start_time_seconds", (), facts.started),
        ("hpctrain_ranks", (), session.world_size),
        ("hpctrain_nodes", (), num_nodes),
        ("hpctrain_cores", (), len(os.sched_getaffinity(0))),
    ]
    if session.rank == 0:
        info = {
            **names,
            "job_id": _job_id(),
            "directory": str(Path(recipe.run.directory).absolute()),
            "version": __version__,
            "device": session.device.type,
            **{name: str(facts.environment[name]) for name in ("launcher", "backend", "algorithm", "wire")},
        }
        given.append(("hpctrain_run_info", tuple(info[name] for name in INFO_LABELS), 1.0))
        given += read_figures_of_starts(Path(recipe.run.directory))
    probes: dict[str, Probe] = {
        "hpctrain_cpu_seconds_total": time.process_time,
        "hpctrain_resident_memory_bytes": lambda: process.memory_info().rss,
        "hpctrain_last_collective_timestamp_seconds": session.world.last_ended,
        "hpctrain_node_seconds_total": lambda: num_nodes * (time.time() - facts.started),
    }
    reduction = facts.reduction
    # Not the method of the reducer: the reduction of a loaded checkpoint may replace it.
    reducers = [lambda: reduction.reducer.bytes_sent()] if reduction is not None else []
    traffic = group_traffic()
    if sends := reducers + ([traffic.num_bytes] if traffic is not None else []):
        probes["hpctrain_sent_bytes_total"] = lambda: sum(num_bytes() for num_bytes in sends)
    if clock is not None:
        probes["hpctrain_time_left_seconds"] = clock.time_left_s
    return RunMetrics(rank=session.rank, given=given, probes=probes)


def _job_id() -> str:
    """Returns the Slurm job id, for a task of a job array as `1234_7`; empty outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
