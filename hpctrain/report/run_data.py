"""Reads a run directory, in any state of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.scaling import (
    Efficiency,
    NodesAdvice,
    RunEvidence,
    ScalingGoal,
    StepTimes,
    advise_nodes,
    no_advice,
    read_step_times,
)
from hpctrain.supervise import Attempt, read_attempts
from hpctrain.telemetry import ENERGY, STEP, RunDirectory

Record = Mapping[str, Any]

# Kinds of records of failures, and of runs that stopped early.
INCIDENTS = (
    "slow", "slow_ended", "loss_jump", "roll_back", "out_of_memory", "damage", "checkpoint_skipped", "stopped",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """The energy that the counters of the run's nodes have measured over all starts.

    Attributes:
        joules: The energy by source, summed over the nodes.
        total_j: The total over the nodes. Of a node with a counter of the whole node, only that counter is included,
            since it includes the energy of all other counters.
        ranks: The ranks that have read the counters of their nodes.
    """

    joules: Mapping[str, float]
    total_j: float
    ranks: frozenset[int]

    @classmethod
    def of(cls, records: Sequence[tuple[int, Record]]) -> Energy | None:
        """Returns the sum of records of the kind `energy`, given as (rank, record); None without records."""
        if not records:
            return None
        joules: dict[str, float] = {}
        for _, record in records:
            for source, value in record["joules"].items():
                joules[source] = joules.get(source, 0.0) + value
        return cls(
            joules=joules,
            total_j=sum(record["total_j"] for _, record in records),
            ranks=frozenset(rank for rank, _ in records),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The content of one run directory.

    Attributes:
        label: The name of the run in the report; no other run of the report has it.
        environment: The environment of the newest start.
        starts: The lines of starts.jsonl.
        summary: The summary; None if no start has ended normally.
        steps: The step records of rank 0; for a repeated step the newest.
        checkpoints: The save records of rank 0; for a repeated save the newest.
        evaluations: The evaluation records of rank 0; for a repeated evaluation the newest.
        performed: For each step of rank 0, including repeated steps: the time of the step's record in seconds since
            1970, and the seconds of the step.
        incidents: Records of the kinds `INCIDENTS`, oldest first: the records of rank 0, and records `damage` of all
            ranks.
        efficiency: The efficiency since the last start; None if not measured.
        times: The times of all ranks; None if not all ranks have recorded their steps.
        why_no_times: Why `times` is None; "" if `times` is not None.
        energy: The energy; None if no counter could be read.
        gradient_bytes: The bytes of a rank's buckets; None if not recorded.
        probe: The document probe.json, with the speeds of nodes and links; None if no speeds were measured before
            training.
        probed_link: The bytes/s of the slowest node's link; None if links were not measured during training.
        calibrations: The entries of reduction.json, which `reduction.algorithm = "auto"` writes.
        advice: Whether more or fewer nodes would pay, for the steps that are left, or for another run like this one if
            it has finished; None if an earlier version of hpctrain has written the directory.
    """

    directory: Path
    label: str
    environment: Mapping[str, Any]
    starts: Sequence[Record]
    summary: Mapping[str, Any] | None
    steps: Sequence[Record]
    checkpoints: Sequence[Record]
    evaluations: Sequence[Record]
    performed: Sequence[tuple[float, float]]
    incidents: Sequence[Record]
    attempts: Sequence[Attempt]
    efficiency: Efficiency | None
    times: StepTimes | None
    why_no_times: str = ""
    energy: Energy | None = None
    gradient_bytes: int | None = None
    probe: Mapping[str, Any] | None = None
    probed_link: float | None = None
    calibrations: Sequence[Record] = ()
    advice: NodesAdvice | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.environment["ranks"])

    @property
    def num_nodes(self) -> int:
        return len(self.environment["node_names"])

    @property
    def status(self) -> str:
        return "runs, or was killed" if self.summary is None else str(self.summary["status"])

    @property
    def shares_cores(self) -> bool:
        """True if the threads of a node's ranks outnumber the cores that they may use."""
        threads: dict[str, int] = {}
        cores: dict[str, set[int]] = {}
        for rank in self.environment["ranks"]:
            host = str(rank["host"])
            threads[host] = threads.get(host, 0) + int(rank["threads"])
            cores.setdefault(host, set()).update(rank["cores"])
        return any(threads[host] > len(cores[host]) for host in threads if cores[host])

    def jobs(self) -> list[str]:
        """Returns the IDs of the run's Slurm jobs, oldest first; empty outside Slurm."""
        variables = [start["environment"].get("variables", {}) for start in self.starts]
        return list(dict.fromkeys(found["SLURM_JOB_ID"] for found in variables if "SLURM_JOB_ID" in found))

    def samples_per_s(self) -> float | None:
        """Returns the samples/s of all ranks, without start-up; None before two steps are known."""
        if self.summary is not None and self.summary.get("samples_per_s"):
            return float(self.summary["samples_per_s"])
        found = self.efficiency
        return None if found is None or not found.step_s else found.samples / found.steps / found.step_s

    def node_hours(self) -> float:
        """Returns the node-hours of the run.

        For a run of `hpctrain supervise`, the duration of every ended attempt counts. For other runs, the time of the
        steps counts, without start-up.
        """
        if self.attempts:
            return sum(
                (attempt.ended - attempt.began) * len(attempt.nodes)
                for attempt in self.attempts
                if attempt.ended is not None
            ) / 3600  # fmt: skip
        begins = [(float(start["time"]), len(start["environment"]["node_names"])) for start in self.starts]
        hours = 0.0
        for at, seconds in self.performed:
            nodes = [count for began, count in begins if began <= at]
            hours += seconds * (nodes[-1] if nodes else self.num_nodes) / 3600
        return hours


def read_run(directory: Path, *, label: str = "", link_bytes_per_s: float | None = None) -> RunData:
    """Returns the content of a run directory.

    link_bytes_per_s: the nominal rate of a node's link, for the advice on a run that has not measured the rate.

    Raises UsageError if the directory is not a run directory, and LaunchError if attempts.jsonl cannot be read.
    """
    run = RunDirectory(directory)
    environment = run.environment()
    steps: dict[int, Record] = {}
    checkpoints: dict[int, Record] = {}
    evaluations: dict[int, Record] = {}
    performed: list[tuple[float, float]] = []
    incidents: list[Record] = []
    efficiency: Efficiency | None = None
    energy: list[tuple[int, Record]] = []
    gradient_bytes: int | None = None
    probed_link: float | None = None
    probe = run.document("probe.json")
    calibrations = (run.document("reduction.json") or {}).get("entries", ())
    starts = [start for start in run.starts() if "environment" in start]
    evidence = _evidence(starts, probe=probe, calibrations=calibrations, link_bytes_per_s=link_bytes_per_s)
    for rank, records in enumerate(run.all_records()):
        for record in records:
            kind = record["kind"]
            if evidence is not None:
                evidence.add(record, rank=rank)
            if kind in INCIDENTS and (rank == 0 or kind == "damage"):
                incidents.append(record)
            if kind == ENERGY:
                energy.append((rank, record))
            if rank > 0:
                continue
            if kind == STEP:
                steps[record["step"]] = record
                performed.append((record["time"], record["seconds"]["step"]))
            elif kind == "checkpoint":
                checkpoints[record["step"]] = record
            elif kind == "evaluation":
                evaluations[record["step"]] = record
            elif kind == "efficiency":
                efficiency = Efficiency.from_document(record)
            elif kind == "buckets":
                gradient_bytes = sum(record["bytes"])
            elif kind == "probe":
                probed_link = min(record["bytes_per_s"])
    summary = run.summary()
    if summary is not None and summary.get("efficiency"):
        efficiency = Efficiency.from_document(summary["efficiency"])
    times, why = None, ""
    try:
        times = read_step_times(directory)
    except UsageError as error:
        why = str(error)
    return RunData(
        directory=directory,
        label=label or directory.resolve().name,
        environment=environment,
        starts=starts,
        summary=summary,
        steps=[steps[step] for step in sorted(steps)],
        checkpoints=[checkpoints[step] for step in sorted(checkpoints)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        performed=performed,
        incidents=sorted(incidents, key=lambda record: float(record["time"])),
        attempts=read_attempts(directory),
        efficiency=efficiency,
        times=times,
        why_no_times=why,
        energy=Energy.of(energy),
        gradient_bytes=gradient_bytes,
        probe=probe,
        probed_link=probed_link,
        calibrations=calibrations,
        advice=None if evidence is None else _advice(evidence, starts[-1], summary=summary),
    )


def _evidence(
    starts: Sequence[Record], *, probe: Record | None, calibrations: Sequence[Record], link_bytes_per_s: float | None
) -> RunEvidence | None:  # fmt: skip
    """Returns what collects the evidence for advice; None if an earlier version has written the starts."""
    if not starts or not {"recipe", "total_steps"} <= starts[-1].keys():
        return None
    try:
        return RunEvidence(starts, probe=probe, calibrations=calibrations, link_bytes_per_s=link_bytes_per_s)
    except KeyError:
        return None


def _advice(evidence: RunEvidence, start: Record, *, summary: Record | None) -> NodesAdvice:
    scaling = start["recipe"].get("scaling") or {}
    goal = ScalingGoal(scaling.get("goal", ScalingGoal.BALANCE))
    try:
        job = evidence.job(finished=summary is not None and summary["status"] == "finished")
        return advise_nodes(job, goal=goal, least_gain=scaling.get("least_gain_percent", 0.0) / 100)
    except UsageError as error:
        return no_advice(error, nodes=len(start["environment"]["node_names"]), goal=goal)
