"""Slurm's reasons for which a job waits, in plain words. Pure."""

from __future__ import annotations

_REASONS = {
    "Priority": "jobs of higher priority are before it in the queue",
    "Resources": "it is next, and waits until enough nodes are free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job that it waits for did not end as asked for, so it will never start: cancel it",
    "BeginTime": "its time to begin has not come; a job that was queued again waits up to two minutes",
    "JobHeldUser": "it is held: `scontrol release JOB` lets it start",
    "JobHeldAdmin": "an administrator holds it; so does Slurm after a failed start: ask the site's support",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows at a time",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, for maintenance before its time limit ends "
    "perhaps: a shorter slurm.time may fit in before",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to one job: lower slurm.nodes",
    "PartitionTimeLimit": "it asks for more time than the partition allows: lower slurm.time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "Reservation": "it waits for its reservation to begin",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for: change slurm.constraint, cpus_per_task or gpus_per_task",
    "Licenses": "it waits for a licence",
    "Cleaning": "its earlier start is still being cleaned up",
    "launch failed requeued held": "a node could not start it, and it is held: `scontrol release JOB` tries again",
    "RaisedSignal:53(Real-time_signal_19)": "Slurm could not write its output file: is the folder there?",
}


def explain_reason(reason: str) -> str | None:
    """Returns what a job's reason means and what can be done; None for one that says it itself or is not known."""
    # `ReqNodeNotAvail, UnavailableNodes:a,b`
    name = reason.partition(",")[0]
    if name in _REASONS:
        return _REASONS[name]
    if name.startswith(("QOSMax", "AssocMax", "QOSGrp", "AssocGrp", "MaxCpu", "MaxNode")):
        return (
            "a limit of the account or QOS on jobs, nodes or hours is reached: it waits for other jobs to end"
        )
    return None
