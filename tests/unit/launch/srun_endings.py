"""What srun and the ranks print at the end of a step (recorded on Slurm 22.05.8 and 24.11.5), and who failed first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ending:
    """code: that srun returned. right: the code of the rank that failed first."""

    code: int
    right: int
    lines: tuple[str, ...]


_STOPPED = (
    "hpctrain: stopped after step 4 of 20 (SIGUSR1); the state is saved and verified in run/checkpoints"
)
_CANCELLED = "slurmstepd-hpct0: error: *** STEP 5.0 ON hpct0 CANCELLED AT 2026-11-28T14:06:09 ***"
_ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish."
_LOST_PEER = (
    "[hpct0:00067] *** An error occurred in Socket closed",
    "[hpct0:00067] *** on a NULL communicator",
)

ENDINGS = {
    "a rank failed while others stopped": Ending(
        code=75, right=3,
        lines=(
            _STOPPED, "srun: error: hpct1: tasks 2-3: Exited with exit code 75",
            "srun: error: hpct0: task 0: Exited with exit code 75",
            "srun: error: hpct0: task 1: Exited with exit code 3",
        ),
    ),
    "all stopped": Ending(
        code=75, right=75,
        lines=(_STOPPED, "srun: error: hpct[0-1]: tasks 0-3: Exited with exit code 75"),
    ),
    "killed for want of memory": Ending(
        code=1, right=137,
        lines=(
            "slurmstepd-hpct0: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of your processes may have "
            "been killed by the cgroup out-of-memory handler.",
            "srun: error: hpct0: task 1: Out Of Memory", _ABORTED, _CANCELLED, "srun: error: hpct1: tasks 2-3: Killed",
        ),
    ),
    "a rank that aborts, and an innocent one that is named first": Ending(
        code=137, right=3,
        lines=(
            "hpctrain: rank 1 ends the run (exit code 3), so that no other rank waits for it", _CANCELLED, _ABORTED,
            "srun: error: hpct0: task 0: Killed", "srun: error: hpct0: task 1: Exited with exit code 3",
            "srun: error: hpct1: tasks 2-3: Killed",
        ),
    ),
    "killed": Ending(
        code=137, right=137,
        lines=(
            "srun: error: hpct0: task 1: Killed", _CANCELLED, _ABORTED, "srun: error: hpct0: task 0: Killed",
            "srun: error: hpct1: task 2: Exited with exit code 6",
        ),
    ),
    "a peer of Open MPI 5 was killed": Ending(
        code=14, right=137,
        lines=(
            *_LOST_PEER, _CANCELLED, "srun: error: hpct1: tasks 2-3: Killed", "srun: error: hpct0: task 0: Killed",
            "srun: error: hpct0: task 1: Exited with exit code 14",
        ),
    ),
    "a peer of Open MPI 5 was killed, which no rank could say": Ending(
        code=14, right=137,
        lines=(
            _CANCELLED, _ABORTED, "srun: error: hpct1: task 3: Killed", "srun: error: hpct1: task 2: Killed",
            "srun: error: hpct0: task 0: Exited with exit code 14", "srun: error: hpct0: task 1: Killed",
        ),
    ),
    "a peer of Open MPI 5 is gone, and nothing says how": Ending(
        code=14, right=137, lines=(*_LOST_PEER, "srun: error: hpct0: task 1: Exited with exit code 14")
    ),
    "a peer of Open MPI 5 failed": Ending(
        code=14, right=4,
        lines=(
            *_LOST_PEER, "srun: error: hpct0: task 1: Exited with exit code 14",
            "srun: error: hpct1: task 2: Exited with exit code 4",
        ),
    ),
    "14 without a lost peer": Ending(
        code=14, right=14, lines=("srun: error: hpct0: task 1: Exited with exit code 14",)
    ),
}  # fmt: skip
