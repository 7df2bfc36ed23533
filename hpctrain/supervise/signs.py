"""Lines that launchers, Slurm, libraries and hpctrain print when something has failed, as patterns. Pure.

Slurm's lines are those of 22.05 to 24.11, Open MPI's those of 4 and 5 (PRRTE), and Hydra's (MPICH, Intel MPI).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpctrain.errors import ExitCode
from hpctrain.launch import (
    LOST_PEER,
    LOST_PEER_CODE,
    STEP_ENDS as STEP_ENDS,
    STOPPED as STOPPED,
    RankFailure,
    find_failure,
)

_NODE = r"(?P<node>[\w.\[\],-]+)"

# Slurm says why it has ended a step or a job.
TIME_LIMIT = re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT")
PREEMPTED = re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION|DUE TO JOB REQUEUE|CANCELLED DUE TO PREEMPTION")
NODE_FAILURE = re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE")
STEP_CANCELLED = re.compile(r"slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT")
# Slurm's PMIx plugin names the rank whose connection broke: it is the one that died.
PMIX_LOST = re.compile(
    r"mpi/pmix\S*: .*[Ee]rror handler invoked: status = -\d+, source = \[\S+:(?P<rank>\d+)\]"
)

MPI_ABORT = re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)")
MPI_ABORT_CODE = re.compile(r"^with errorcode (?P<code>\d+)\.$")
# Open MPI's TCP transport: a rank on that host has gone, or the whole host has. srun need not notice it. Open MPI 5
# does not always name the host.
PEER_GONE = re.compile(rf"^\s*Peer host:\s+{_NODE}\s*$|{LOST_PEER.pattern}")

# A node is gone, or cannot be reached.
_LOST_NODE = [
    re.compile(rf"srun: error: Node failure on {_NODE}"),
    re.compile(
        rf"srun: error: Task launch for .*\S+ failed on node {_NODE}: "
        r"(Communication connection failure|Socket timed out|Connection (refused|timed out)|No route to host)"
    ),
    re.compile(
        rf"(?:ORTE|PRTE) has lost communication with a remote daemon|^ *Remote daemon: .* on node {_NODE}"
    ),
    re.compile(
        rf"^{_NODE} cannot be reached from \S.*: (its link|the link of {_NODE.replace('node', 'same')}) is cut"
    ),
    re.compile(rf"^{_NODE} (\(this host\) )?reaches none of the .*: its (own )?link is cut"),
    re.compile(r"^\S+ cannot be reached from \S+ \(this host\): the link of one of the two is cut(?P<node>)"),
]
# srun has lost its connection to the daemon of a step (slurmstepd) on the node of this number.
STEPD_GONE = re.compile(
    r"srun: error: .*io error .*(?:slurmstepd|step) on node (?P<number>\d+)|Cannot communicate with node (?P<other>\d+)"
)

OUT_OF_MEMORY = re.compile(
    r"ran out of memory.* in a micro-batch of one sample"
    r"|\boom[-_ ]?kill|Out Of Memory|[Ee]xceeded (job |step )?memory limit"
    r"|OutOfMemoryError|\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|CUDA out of memory|CUDA error: out of memory|hipErrorOutOfMemory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Unable to allocate .* for an array"
)
SRUN_OUT_OF_MEMORY = re.compile(rf"srun: error: {_NODE}: tasks? \S+: Out Of Memory")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]|errno = (28|122)\b")

# Our own lines.
# In the reason of such a stop: the ranks' own clock (`hpctrain.resilience.WallClock`) names what ends the time.
TIME_OVER = re.compile(r"Slurm's time limit|HPCTRAIN_DEADLINE|stop\.after_s")
RANK_ENDS = re.compile(r"hpctrain: rank (?P<rank>\d+) ends the run \(exit code (?P<code>\d+)\)")
RANK_SAYS = re.compile(r"^hpctrain: rank \d+ on \S+: (?P<text>.*)$")
DID_NOT_COME = re.compile(rf"^ {{2}}ranks? [\d, -]+ on {_NODE} \S")
HANG = re.compile(r"did not come: rank|the operation itself hangs|has waited \S+ s .*\(limit")
DIFFERENT_CALLS = re.compile(r"with different arguments|must be the same on every rank")
SAYS = re.compile(r"^hpctrain: (?P<text>(?!rank \d+ (?:ends|on \S+ (?:has waited|ends))).+)$")

TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
EXCEPTION = re.compile(r"^(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration)\b.*)$")
# An exception that says that another rank or a connection to it is gone: a consequence.
BROKEN_CONNECTION = re.compile(
    r"MPI_ERR_|mpi4py\.MPI\.Exception|Connection (reset|refused|closed)|Broken pipe|HorovodInternalError"
    r"|Horovod has been shut down"
)

MPIRUN_EXIT_CODE = re.compile(r"^\s+Exit code:\s+\d+")
# MPICH's and Intel MPI's forms. Neither says which rank ended first; `hpctrain launch` finds out.
HYDRA_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (?P<mpich>\d+)\)|=\s+KILLED BY SIGNAL: (?P<intel>\d+)")
HYDRA_NODE = re.compile(rf"=\s+(?:RANK \d+ )?PID \d+ RUNNING AT {_NODE}")

_TELLING = (
    TIME_LIMIT, PREEMPTED, NODE_FAILURE, STEP_ENDS, PMIX_LOST, MPI_ABORT, MPI_ABORT_CODE, PEER_GONE, STEPD_GONE,
    OUT_OF_MEMORY, DISK_FULL, STOPPED, RANK_ENDS, RANK_SAYS, DID_NOT_COME, HANG, DIFFERENT_CALLS, SAYS, TRACEBACK,
    EXCEPTION, MPIRUN_EXIT_CODE, HYDRA_SIGNAL, HYDRA_NODE, *_LOST_NODE,
)  # fmt: skip


def is_telling(line: str) -> bool:
    """Returns True if the classifier may use this line."""
    return any(sign.search(line) for sign in _TELLING) or find_failure(line.encode()) is not None


def failures_in(lines: Sequence[str]) -> Iterator[tuple[int, RankFailure]]:
    """Yields the ranks that the launcher reports as failed, each with the index of its line.

    Not those that stopped, nor those that left because they lost a peer. Open MPI 5 breaks its line in two.
    """
    lost_peer = any(LOST_PEER.search(line) for line in lines)
    for index, line in enumerate(lines):
        failure = find_failure(line.encode())
        if failure is None and line.endswith("exited on") and index + 1 < len(lines):
            failure = find_failure(f"{line} {lines[index + 1]}".encode())
        if failure is None or failure.exit_code == ExitCode.STOPPED_EARLY:
            continue
        if not (lost_peer and failure.exit_code == LOST_PEER_CODE):
            yield index, failure


def lost_node_in(line: str) -> str | None:
    """Returns the node that this line says is lost: its name, or `#2` for number 2 of the step; None for other lines.

    "" if the line says so without naming it.
    """
    for sign in _LOST_NODE:
        match = sign.search(line)
        if match is not None:
            return match["node"] or ""
    match = STEPD_GONE.search(line)
    if match is not None:
        return f"#{match['number'] or match['other']}"
    return "" if NODE_FAILURE.search(line) else None


def says_a_loss(line: str) -> bool:
    """Returns True if this line says that a node or a rank is gone."""
    return lost_node_in(line) is not None or PEER_GONE.search(line) is not None
