"""Checks the Slurm settings that decide whether the state of a stopped run is saved and the run is requeued.

Rank 0 asks Slurm once. The settings are explained in slurm.conf(5) and cgroup.conf(5).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from hpctrain.launch import (
    SlurmUnavailable,
    ask_once,
    parse_duration,
    read_config,
    read_pairs,
    survey_machine,
)
from hpctrain.run.doctor.finding import Finding, ok, warning

_TIMEOUT_S = 5.0
_DEFAULT_KILL_WAIT_S = 30
# The settings that are judged, or that explain a judgement in the JSON report.
_SETTINGS = (
    "SLURM_VERSION", "JobRequeue", "KillWait", "MpiDefault", "ProctrackType", "TaskPlugin", "PreemptMode",
    "PreemptType", "SlurmctldParameters", "SlurmdTimeout", "UnkillableStepTimeout", "PropagateResourceLimits",
    "PropagateResourceLimitsExcept", "ConstrainCores", "ConstrainRAMSpace", "ConstrainDevices",
)  # fmt: skip


def ask_slurm(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns Slurm's settings, and facts about this job and its partition; {} without Slurm.

    The controller gets at most three short requests. The key `error` is set if the controller does not answer.
    """
    job, partition = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_PARTITION")
    if shutil.which("scontrol") is None:
        return {"job_id": job, "error": "there is no scontrol here"} if job else {}
    try:
        config = read_config(_scontrol("show", "config"))
        facts: dict[str, Any] = {
            "config": {name: config[name] for name in _SETTINGS if name in config},
            "job_id": job,
        }
        if partition is not None:
            facts["partition"] = read_pairs(_scontrol("--oneliner", "show", "partition", partition))
        if job is not None:
            pairs = read_pairs(_scontrol("--oneliner", "show", "job", job))
            facts["job"] = {
                name: pairs[name] for name in ("Requeue", "TimeLimit", "Partition", "QOS") if name in pairs
            }
    except SlurmUnavailable as error:
        return {"job_id": job, "error": str(error)}
    srun = survey_machine().srun
    facts["mpi_types"] = list(srun.mpi_types) if srun is not None else []
    return facts


def _scontrol(*words: str) -> str:
    return ask_once(["scontrol", *words], timeout_s=_TIMEOUT_S)


def judge_slurm(facts: Mapping[str, Any] | None, *, mpi_library: str = "") -> list[Finding]:
    """Returns the findings about Slurm's settings. Pure.

    facts: the result of `ask_slurm`.
    mpi_library: the name that the MPI library gives itself.
    """
    if not facts:
        return []
    if "error" in facts and facts["job_id"] is None:
        return [
            ok("Slurm", "its commands are installed, but no controller answers: not a machine of a cluster")
        ]
    if "error" in facts:
        cure = (
            "in a container the job must be queued again by the batch script outside of it, as slurm/train.sbatch "
            "does; else the controller is busy: try again later"
        )
        return [warning("Slurm", f"its settings are unknown: {facts['error']}", cure)]
    config, in_job = facts["config"], facts.get("job_id") is not None
    findings = [
        *_requeue(config, facts.get("job", {}), in_job=in_job),
        *_kill_wait(config),
        *_preemption(config, facts.get("partition", {})),
        *_mpi_types(config, facts["mpi_types"], mpi_library),
        *_containment(config),
    ]
    kept = "is requeued" if config.get("JobRequeue") == "1" else "is not requeued"
    summary = (
        f"{config.get('SLURM_VERSION', 'unknown version')}, a job that loses a node {kept}, a lost node is noticed "
        f"after {config.get('SlurmdTimeout', 'an unknown time')}, KillWait {config.get('KillWait', 'unknown')}, "
        f"srun --mpi: {', '.join(facts['mpi_types']) or 'none'}"
    )
    return [ok("Slurm", summary), *findings]


def _requeue(config: Mapping[str, str], job: Mapping[str, str], *, in_job: bool) -> list[Finding]:
    cure = "sbatch --requeue, or #SBATCH --requeue in the script; where the site forbids it, chain jobs"
    if in_job and job.get("Requeue") == "0":
        return [
            warning(
                "Slurm: requeue",
                "this job may not be requeued: it ends when it is stopped or preempted",
                cure,
            )
        ]
    if not in_job and config.get("JobRequeue") == "0":
        return [
            warning("Slurm: requeue", "jobs are not requeued unless they ask for it (JobRequeue=0)", cure)
        ]
    return []


def _kill_wait(config: Mapping[str, str]) -> list[Finding]:
    seconds = parse_duration(config.get("KillWait", ""))
    if seconds is None or seconds >= _DEFAULT_KILL_WAIT_S:
        return []
    return [
        warning(
            "Slurm: KillWait",
            f"{seconds} s after SIGTERM processes are killed (scancel, and at the time limit): too short for a save",
            "ask for an earlier signal of your own, #SBATCH --signal=B:USR1@120 with time for one step and one save",
        )
    ]


def _preemption(config: Mapping[str, str], partition: Mapping[str, str]) -> list[Finding]:
    if config.get("PreemptType", "preempt/none") == "preempt/none":
        return []
    topic = "Slurm: preemption"
    mode = partition.get("PreemptMode", config.get("PreemptMode", "OFF"))
    if mode.startswith("OFF"):
        return [ok(topic, "jobs of this partition are not preempted")]
    grace = parse_duration(partition.get("GraceTime", ""))
    sends_signal = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
    shown = "unknown" if grace is None else f"{grace} s"
    if grace == 0 or not sends_signal:
        signal = (
            "the job's own --signal" if sends_signal else "SIGTERM to the steps, not the job's own --signal"
        )
        return [
            warning(
                topic,
                f"PreemptMode={mode}: a preempted job gets {signal}, grace time {shown}, then KillWait",
                "save often (checkpoint.every_minutes), since the time may not suffice; ask the site for GraceTime on "
                "the partition and SlurmctldParameters=preempt_send_user_signal. The grace time of a QOS is not seen "
                "here: sacctmgr show qos format=name,gracetime",
            )
        ]
    return [ok(topic, f"PreemptMode={mode}, the job's own signal is sent, grace time {shown}")]


def _mpi_types(config: Mapping[str, str], types: list[str], mpi_library: str) -> list[Finding]:
    has_pmix = any(name.startswith("pmix") for name in types)
    if "Open MPI" in mpi_library and types and not has_pmix:
        return [
            warning(
                "Slurm: PMIx",
                f"srun has no PMIx ({', '.join(types)}), so it cannot start ranks of {mpi_library}",
                "start the ranks with mpirun inside the job (`hpctrain launch` does), or ask the site for Slurm's "
                "plugin mpi/pmix",
            )
        ]
    default = config.get("MpiDefault", "none")
    if types and default == "none":
        wanted = "pmix" if has_pmix else "pmi2"
        return [
            warning(
                "Slurm: PMIx",
                "MpiDefault=none: a plain srun starts ranks that cannot connect",
                f"srun --mpi={wanted} (`hpctrain launch` and slurm/train.sbatch set it)",
            )
        ]
    return []


def _containment(config: Mapping[str, str]) -> list[Finding]:
    findings = []
    tracking = config.get("ProctrackType", "")
    if tracking and tracking != "proctrack/cgroup":
        findings.append(
            warning(
                "Slurm: cgroups",
                f"{tracking}: processes that leave their session outlive the job, and keep memory and devices",
                "look for left processes before a run that fails at start (pgrep -u $USER); ask the site for "
                "ProctrackType=proctrack/cgroup",
            )
        )
    plugins = config.get("TaskPlugin", "")
    binds = "affinity" in plugins or config.get("ConstrainCores", "").lower() == "yes"
    if plugins and not binds:
        findings.append(
            warning(
                "Slurm: cores",
                f"TaskPlugin={plugins}: steps are not bound to their cores, so jobs on one node disturb each other",
                "ask for whole nodes (--exclusive), or the site for TaskPlugin=task/affinity,task/cgroup",
            )
        )
    return findings
