"""What Slurm's commands print when they fail: whether to try again, and what the user can change. Pure."""

from __future__ import annotations

import re

# The controller is overloaded, restarting or changing over to its backup. Texts of Slurm's slurm_errno.c and of the
# retries that its commands announce; the last ones are those of newer versions.
_BUSY = re.compile(
    r"Unable to contact slurm controller|Slurm temporarily unable to accept job|Slurm controller not responding"
    r"|Slurm backup controller in standby mode|Socket timed out on send/recv operation"
    r"|Zero Bytes were transmitted or received|Transport endpoint is not connected|Resource temporarily unavailable"
    r"|Connection (refused|timed out|reset by peer)|Unable to create job record, try again"
    r"|Job can not be altered now, try again later|[Ff]ailed to open persistent connection"
    r"|RPC (rate )?limit",
)
# The command may have been carried out although its answer was lost.
_ANSWER_LOST = re.compile(
    r"Socket timed out|Zero Bytes|receive failure|Connection (timed out|reset by peer)|Transport endpoint"
)

_CHANGES = (
    (r"invalid partition", "set slurm.partition to one that `sinfo --summarize` lists"),
    (
        r"nvalid account",
        "set slurm.account to one that `sacctmgr show associations user=$USER format=account,partition,qos` lists",
    ),
    (r"nvalid qos", "set slurm.qos to one that `sacctmgr show associations user=$USER format=account,qos` lists"),
    (r"group not permitted to use this partition", "set slurm.partition to one that this user may use"),
    (
        r"time limit is invalid",
        "lower slurm.time to the partition's limit, which `sinfo --format='%P %l'` shows",
    ),
    (
        r"Node count specification invalid|Requested partition configuration not available",
        "lower slurm.nodes or slurm.time to the partition's limits: `scontrol show partition`",
    ),
    (
        r"More processors requested|node configuration is not available|CPU count per node|more tasks than",
        "no node has this, or too few have: compare slurm.tasks_per_node x slurm.cpus_per_task, gpus_per_task, "
        "constraint and slurm.nodes with `sinfo --format='%P %D %c %m %G %f'`",
    ),
    (r"nvalid feature", "set slurm.constraint to features that `sinfo --format='%P %f'` lists"),
    (r"generic resource|nvalid GRES", "gpus_per_task: `sinfo --format='%P %G'` shows the GPUs of the nodes"),
    (r"reservation", "set slurm.reservation to one that `scontrol show reservation` lists"),
    (r"dependency", "slurm.dependency: write TYPE:JOB, such as afterok:1234, of a job that Slurm still knows"),
    (
        r"violates accounting/QOS policy",
        "the account or QOS allows fewer jobs, nodes or hours: wait for running jobs, or lower slurm.nodes or time",
    ),
    (r"[Aa]rray", "slurm.array or slurm.sweep: `scontrol show config | grep MaxArraySize` shows the largest index"),
    (r"nvalid --?mail-type", "slurm.mail_type: events are BEGIN, END, FAIL, REQUEUE, TIME_LIMIT_80, ALL"),
    (r"nrecognized option|unknown option|nvalid option", "slurm.options: this Slurm does not know the option"),
)  # fmt: skip


def is_busy(text: str) -> bool:
    """True if the controller could not answer now, but may do so in a moment. text: what a command printed."""
    return _BUSY.search(text) is not None


def answer_may_be_lost(text: str) -> bool:
    """True if the controller may have carried out the command although the command failed."""
    return _ANSWER_LOST.search(text) is not None


def what_to_change(text: str) -> str | None:
    """Returns what the user can do about sbatch's refusal; None if this text is not known."""
    return next((change for pattern, change in _CHANGES if re.search(pattern, text)), None)
