"""The failure classifier: pure functions that conclude from the evidence on an attempt's end why it ended.

Certain evidence is judged first: a normal end, a requested stop, nodes that do not answer. Next are lines that name an
exhausted resource (memory, disk). Next is the rank that failed first: a rank that says in its own message that it ends
the run, a rank that a signal has ended, or a rank that has exited with an error code.

The launcher ends all other ranks after such a failure, and its messages also name these ranks. A line of srun with
`Killed` names a rank that failed. A line with `Terminated`, and any line after the announcement that the step ends,
names ranks that did not fail.

The kernel counts the processes that it has ended because memory ran out. This counter is used only to explain why a
rank was killed, since it also counts processes of other jobs on the node.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hpctrain.errors import ExitCode
from hpctrain.launch import (
    LOST_PEER,
    LOST_PEER_CODE,
    OWN_FAILURE_CODES,
    STEP_ENDS as STEP_ENDS,
    STOPPED as STOPPED,
    RankFailure,
    find_failure,
    signal_name,
)
from hpctrain.telemetry import SCALING_STOP


class AttemptEnd(str, Enum):
    """Why an attempt ended.

    FINISHED: the command exited with 0. OTHER_NODES: the ranks stopped to continue on another number of nodes
    (`scaling.act`). RESIZED: the supervisor asked the ranks of an elastic run to stop, so that another number of ranks
    continues. UNKNOWN: no evidence tells why.
    """

    FINISHED = "finished"
    WALL_CLOCK = "wall clock"
    PREEMPTION = "preemption"
    CANCELLED = "cancelled"
    LOST_NODE = "lost node"
    LOST_RANK = "lost rank"
    OUT_OF_MEMORY = "out of memory"
    DISK_FULL = "disk full"
    USER_ERROR = "user error"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    OTHER_NODES = "other nodes"
    RESIZED = "resized"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of the classifier.

    cause: why the attempt ended.
    reason: one line for the user, in most cases the line of the log on which the diagnosis is based.
    nodes: names of the nodes to which the failure is attributed; empty if the failure is not tied to nodes.
    error: text by which the same error is recognized in a later attempt; "" if the cause is not an error of the
    program, its data or its files, or if the error need not occur again.
    """

    cause: AttemptEnd
    reason: str
    nodes: tuple[str, ...] = ()
    error: str = ""


# Lines that launchers, Slurm, libraries and hpctrain print when something has failed, as patterns. Pure.
#
# Slurm's lines are those of 22.05 to 24.11, Open MPI's those of 4 and 5 (PRRTE), and Hydra's (MPICH, Intel
# MPI).


_NODE = r"(?P<node>[\w.\[\],-]+)"

# Slurm's messages on why it has ended a step or a job.
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

# Lines that hpctrain prints.
# Part of the reason of a stop: the ranks' own clock (`hpctrain.resilience.WallClock`) names the limit that ends.
TIME_OVER = re.compile(r"Slurm's time limit|HPCTRAIN_DEADLINE|stop\.after_s")
RANK_ENDS = re.compile(r"hpctrain: rank (?P<rank>\d+) ends the run \(exit code (?P<code>\d+)\)")
RANK_SAYS = re.compile(r"^hpctrain: rank \d+ on \S+: (?P<text>.*)$")
DID_NOT_COME = re.compile(rf"^ {{2}}ranks? [\d, -]+ on {_NODE} \S")
HANG = re.compile(r"did not come: rank|the operation itself hangs|has waited \S+ s .*\(limit")
DIFFERENT_CALLS = re.compile(r"with different arguments|must be the same on every rank")
SAYS = re.compile(
    r"^hpctrain: (?P<text>(?!rank \d+ (?:ends|on \S+ (?:has waited|ends|is gone))"
    r"|\S+ (?:keeps|cannot keep) the state).+)$"
)
# In an elastic run: a rank of this node has ended and said nothing before; and what the ranks that are left keep.
RANK_GONE = re.compile(r"^hpctrain: rank (?P<rank>\d+) on (?P<node>\S+) is gone\b")
STATE_KEPT = re.compile(r"^hpctrain: (?P<node>\S+) (?:keeps|cannot keep) the state after step (?P<step>\d+)")

TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
EXCEPTION = re.compile(r"^(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration)\b.*)$")
# An exception that reports the loss of another rank, or of the connection to it: a consequence.
BROKEN_CONNECTION = re.compile(
    r"MPI_ERR_|mpi4py\.MPI\.Exception|Connection (reset|refused|closed)|Broken pipe|HorovodInternalError"
    r"|Horovod has been shut down"
)

MPIRUN_EXIT_CODE = re.compile(r"^\s+Exit code:\s+\d+")
# Messages of MPICH and Intel MPI. Neither names the rank that ended first; `hpctrain launch` finds it.
HYDRA_SIGNAL = re.compile(r"EXIT STRING: .*\(signal (?P<mpich>\d+)\)|=\s+KILLED BY SIGNAL: (?P<intel>\d+)")
HYDRA_NODE = re.compile(rf"=\s+(?:RANK \d+ )?PID \d+ RUNNING AT {_NODE}")

_TELLING = (
    TIME_LIMIT, PREEMPTED, NODE_FAILURE, STEP_ENDS, PMIX_LOST, MPI_ABORT, MPI_ABORT_CODE, PEER_GONE, STEPD_GONE,
    OUT_OF_MEMORY, DISK_FULL, STOPPED, RANK_GONE, RANK_ENDS, RANK_SAYS, DID_NOT_COME, HANG, DIFFERENT_CALLS, SAYS,
    TRACEBACK, EXCEPTION, MPIRUN_EXIT_CODE, HYDRA_SIGNAL, HYDRA_NODE, *_LOST_NODE,
)  # fmt: skip


def is_telling(line: str) -> bool:
    """Returns True if the classifier may need this line of a log."""
    return any(sign.search(line) for sign in _TELLING) or find_failure(line.encode()) is not None


def failures_in(lines: Sequence[str]) -> Iterator[tuple[int, RankFailure]]:
    """Yields the ranks that the launcher reports as failed, each with the index of the line that reports it.

    Ranks that stopped early, or that exited because they had lost the connection to another rank, are left out. A
    message that Open MPI 5 splits over two lines is recognized.
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
    """Returns the node that this line reports as lost; None if it reports no lost node.

    The result is the node's name, or `#2` for number 2 of the step's nodes, or "" if the line does not name the node.
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
    """Returns True if this line reports that a node or a rank is lost."""
    return lost_node_in(line) is not None or PEER_GONE.search(line) is not None


# Seconds before the time limit in which a warning may come; SIGTERM comes at the limit itself.
_WARNED_BEFORE_S = 900.0
_AT_THE_LIMIT_S = 60.0
_CAUSE_OF_CODE: dict[int, AttemptEnd] = {  # of other codes: USER_ERROR
    ExitCode.DATA: AttemptEnd.DATA,
    ExitCode.CHECKPOINT: AttemptEnd.CHECKPOINT,
    ExitCode.OUT_OF_MEMORY: AttemptEnd.OUT_OF_MEMORY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about the end of an attempt. Times are in seconds since 1970.

    exit_code: exit code of mpirun or srun, 128 + n for signal n; None if unknown, because the supervisor was ended
    together with the attempt.
    lines: lines that the launcher and the ranks printed to stderr, in order; then the end that a rank announced in
    watch/ending.json, if any, as a line.
    failure: the rank that failed first, as `hpctrain launch` has found; used if Hydra (MPICH, Intel MPI) does not name
    this rank.
    ended: end of the attempt.
    time_limit: end of the job by the job's time limit; None if the job has no limit, or the limit is unknown.
    signals: names of the signals that asked the supervisor to stop, in order.
    nodes: nodes of the attempt, in Slurm's order.
    silent_nodes: nodes that no longer answer.
    answering_nodes: nodes that answered after the end of the attempt.
    oom_nodes: nodes on which the kernel ended processes during the attempt because memory ran out.
    overdue_s: limit in seconds, counted from the launch, at which the attempt was ended because training had not
    started; None if the attempt was not ended for this reason.
    preempted: True if Slurm reports that it has preempted the job.
    """

    exit_code: int | None
    lines: Sequence[str] = ()
    failure: RankFailure | None = None
    ended: float = 0.0
    time_limit: float | None = None
    signals: Sequence[str] = ()
    nodes: Sequence[str] = ()
    silent_nodes: Sequence[str] = ()
    answering_nodes: Sequence[str] = ()
    oom_nodes: Sequence[str] = ()
    overdue_s: float | None = None
    preempted: bool = False


def classify(evidence: Evidence) -> Diagnosis:
    """Returns the cause of an attempt's end."""
    for judge in (_wanted_end, _lost_node, _resources):
        diagnosis = judge(evidence)
        if diagnosis is not None:
            return diagnosis
    who_failed = _who_failed(evidence)
    diagnosis = _by_counter(who_failed, evidence) or who_failed
    if diagnosis is not None:
        return diagnosis
    code = evidence.exit_code
    reason = "how the ranks ended is not known" if code is None else f"exit code {code}, and no line says why"
    return Diagnosis(cause=AttemptEnd.UNKNOWN, reason=reason)


def _wanted_end(evidence: Evidence) -> Diagnosis | None:
    """Recognizes an intended end: by the command itself, by the user, or by Slurm."""
    if evidence.exit_code == ExitCode.DONE:
        return Diagnosis(cause=AttemptEnd.FINISHED, reason="the command ended with 0")
    for sign, cause in ((TIME_LIMIT, AttemptEnd.WALL_CLOCK), (PREEMPTED, AttemptEnd.PREEMPTION)):
        match = _first(sign, evidence.lines)
        if match is not None:
            return Diagnosis(cause=cause, reason=match.string)
    left_s = float("inf") if evidence.time_limit is None else evidence.time_limit - evidence.ended
    if evidence.exit_code is None and left_s < _AT_THE_LIMIT_S:
        return Diagnosis(cause=AttemptEnd.WALL_CLOCK, reason="the time limit of the job was over")
    if evidence.exit_code in OWN_FAILURE_CODES:
        return None  # a rank failed while the others stopped
    if not evidence.signals and (
        evidence.exit_code != ExitCode.STOPPED_EARLY or evidence.overdue_s is not None
    ):
        return None
    saved = _first(STOPPED, evidence.lines)
    asked = evidence.signals[0] if evidence.signals else (saved["reason"] if saved else "unknown reason")
    how = f"stopped ({asked})" + (", the state is saved" if saved else "")
    if saved is not None and TIME_OVER.search(saved["reason"]):
        return Diagnosis(
            cause=AttemptEnd.WALL_CLOCK, reason=f"stopped ({saved['reason']}), the state is saved"
        )
    if asked.startswith(SCALING_STOP):
        return Diagnosis(cause=AttemptEnd.OTHER_NODES, reason=how)
    if evidence.preempted:
        return Diagnosis(cause=AttemptEnd.PREEMPTION, reason=f"{how}: Slurm has preempted the job")
    at_limit_s = _AT_THE_LIMIT_S if asked.startswith("SIGTERM") else _WARNED_BEFORE_S
    if left_s < at_limit_s and not asked.startswith(("SIGINT", "SIGHUP")):
        return Diagnosis(
            cause=AttemptEnd.WALL_CLOCK, reason=f"{how}, {max(0.0, left_s):.0f} s before the time limit"
        )
    if asked.startswith("SIGUSR1"):
        return Diagnosis(cause=AttemptEnd.PREEMPTION, reason=f"{how}, long before any time limit")
    return Diagnosis(cause=AttemptEnd.CANCELLED, reason=how)


def _lost_node(evidence: Evidence) -> Diagnosis | None:
    silent = tuple(node for node in evidence.nodes if node in evidence.silent_nodes)
    found: dict[str, str] = {}  # node, or "" -> the line that reports its loss
    for line in evidence.lines:
        name = lost_node_in(line)
        if name is not None:
            found.setdefault(_name_of(name, evidence.nodes), line)
        elif STEP_ENDS.search(line) or RANK_ENDS.search(line):
            break  # what breaks off after this breaks off because of it
    named = tuple(node for node in found if node)
    reason = next((line for node, line in found.items() if node), next(iter(found.values()), ""))
    if silent:
        return Diagnosis(
            cause=AttemptEnd.LOST_NODE,
            reason=reason or f"{', '.join(silent)} does not answer any more",
            nodes=silent,
        )
    if not found:
        return None
    if all(map(STEPD_GONE.search, found.values())) and {*named} <= {*evidence.answering_nodes}:
        # The node works: Slurm's daemon of the step was killed there, and the ranks with it.
        return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=reason, nodes=named)
    return Diagnosis(cause=AttemptEnd.LOST_NODE, reason=reason, nodes=named)


def _name_of(name: str, nodes: Sequence[str]) -> str:
    """Returns the name of a node that is given by name, or as `#2` for number 2 of the step's nodes; "" if unknown."""
    if not name.startswith("#"):
        return name
    number = int(name[1:])
    return nodes[number] if number < len(nodes) else ""


def _resources(evidence: Evidence) -> Diagnosis | None:
    """Recognizes exhausted memory or disk space, by the first line that reports it."""
    for line in evidence.lines:
        if OUT_OF_MEMORY.search(line):
            victim = _first(SRUN_OUT_OF_MEMORY, evidence.lines)
            nodes = (victim["node"],) if victim else ()
            # hpctrain has met it itself, and could not divide the batch any further: it will come again.
            error = _fingerprint(line) if evidence.exit_code == ExitCode.OUT_OF_MEMORY else ""
            return Diagnosis(cause=AttemptEnd.OUT_OF_MEMORY, reason=line.strip(), nodes=nodes, error=error)
        if DISK_FULL.search(line):
            return Diagnosis(cause=AttemptEnd.DISK_FULL, reason=line.strip(), error=_fingerprint(line))
    return None


def _by_counter(found: Diagnosis | None, evidence: Evidence) -> Diagnosis | None:
    """Returns out of memory as the cause, if the kernel's counter explains a killed or silently ended rank.

    found: diagnosis by the lines of the log. None is returned if the ranks ended for another reason.
    """
    says_nothing = found is None or (found.cause is AttemptEnd.LOST_RANK and "(SIG" not in found.reason)
    first = _first_failure(evidence.lines) or _hydra_failure(evidence)
    was_killed = first is not None and first.signal == signal.SIGKILL
    of_a_killed_process = found is not None and re.search(r"SIGKILL|signal: Killed", found.reason) is not None
    if not evidence.oom_nodes or not (says_nothing or was_killed or of_a_killed_process):
        return None
    names = ", ".join(evidence.oom_nodes)
    return Diagnosis(
        cause=AttemptEnd.OUT_OF_MEMORY,
        reason=f"the kernel of {names} has killed processes because memory ran out",
        nodes=tuple(evidence.oom_nodes),
    )


def _who_failed(evidence: Evidence) -> Diagnosis | None:
    lines = evidence.lines
    own, text = _first(RANK_ENDS, lines), _error_text(lines)
    if own is not None and int(own["code"]) != ExitCode.COMMUNICATION and not _is_consequence(lines):
        return _by_code(int(own["code"]), text=text or own.string, evidence=evidence)
    hydra, peer = _first(HYDRA_SIGNAL, lines), _first(PEER_GONE, lines)
    victim = _victim(lines) or _hydra_failure(evidence)
    if victim is not None and (victim.signal is not None or (hydra is not None and victim.exit_code > 128)):
        by = "a signal" if victim.signal is None else signal_name(victim.signal)
        reason = f"rank {victim.rank} on {victim.node} was ended by {by}"
        return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=reason, nodes=(victim.node,))
    if hydra is not None and victim is None:
        node = _first(HYDRA_NODE, lines)
        reason = f"a rank was ended by {signal_name(int(hydra['mpich'] or hydra['intel']))}"
        return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=reason, nodes=(node["node"],) if node else ())
    if victim is None and own is None and peer is not None:
        on = f" on {peer['node']}" if peer["node"] else ""
        reason = f"the other ranks have lost the connection to a rank{on}"
        return Diagnosis(
            cause=AttemptEnd.LOST_RANK, reason=reason, nodes=(peer["node"],) if peer["node"] else ()
        )
    if evidence.overdue_s is not None:
        return Diagnosis(
            cause=AttemptEnd.HANG,
            reason=f"training had not begun {evidence.overdue_s:.0f} s after the launch",
        )
    if own is not None:
        return _by_code(int(own["code"]), text=text, evidence=evidence)
    if victim is not None:
        return _by_code(victim.exit_code, text=text, evidence=evidence)
    cancelled = _first(STEP_CANCELLED, lines)
    # Slurm 24.11 also prints this when a rank ends all ranks after a hang, before it reports how any has ended.
    if cancelled is not None and not text and _first(HANG, lines) is None:
        return _cancelled_or_killed(cancelled.string, lines)
    gone = _first(RANK_GONE, lines)
    if gone is not None and not text and _first(HANG, lines) is None:
        reason = f"rank {gone['rank']} on {gone['node']} has ended without a message"
        return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=reason, nodes=(gone["node"],))
    code = evidence.exit_code
    says_so = text or _first(MPIRUN_EXIT_CODE, lines) is not None
    if code is None or not (says_so or code > 128 or code in ExitCode.__members__.values()):
        return None
    return _by_code(code, text=text, evidence=evidence)


def _cancelled_or_killed(cancelled: str, lines: Sequence[str]) -> Diagnosis:
    """Judges a step that Slurm reports as cancelled although nobody has asked the supervisor to stop.

    Slurm 24.11 prints the same for a killed rank and for `scancel JOB.STEP`: first that the step is cancelled, then
    that a task was killed. It is taken as a killed rank, because a user who wants to end the run can tell the
    supervisor.
    """
    killed = next((failure for _, failure in failures_in(lines) if failure.signal == signal.SIGKILL), None)
    if killed is None:
        return Diagnosis(cause=AttemptEnd.CANCELLED, reason=cancelled)
    reason = (
        f"rank {killed.rank} on {killed.node} was killed, or somebody has cancelled the step: {cancelled}"
    )
    return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=reason, nodes=(killed.node,))


def _by_code(code: int, *, text: str, evidence: Evidence) -> Diagnosis | None:
    """Judges by the exit code of the rank that failed first. text: the error that it printed."""
    if code == ExitCode.COMMUNICATION:
        return _communication(evidence, text=text)
    if code > 128 and not text:
        return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=f"a rank was ended by {signal_name(code - 128)}")
    cause = _CAUSE_OF_CODE.get(code, AttemptEnd.USER_ERROR)
    reason = text or f"a rank ended with exit code {code}"
    return Diagnosis(cause=cause, reason=reason, error=_fingerprint(reason))


def _communication(evidence: Evidence, *, text: str) -> Diagnosis:
    different = _first(DIFFERENT_CALLS, evidence.lines)
    if different is not None:
        return Diagnosis(
            cause=AttemptEnd.USER_ERROR, reason=different.string.strip(), error=_fingerprint(different.string)
        )
    hang = _first(HANG, evidence.lines)
    if hang is not None:
        late = [match for line in evidence.lines if (match := DID_NOT_COME.search(line))]
        named = late[0].string.strip() if late else hang.string.strip()
        return Diagnosis(
            cause=AttemptEnd.HANG, reason=named, nodes=tuple(dict.fromkeys(match["node"] for match in late))
        )
    return Diagnosis(cause=AttemptEnd.LOST_RANK, reason=text or "communication between the ranks failed")


def _victim(lines: Sequence[str]) -> RankFailure | None:
    """Returns the rank that failed first, according to the launcher.

    It is the rank named by Slurm's PMIx plugin or by MPI_Abort, or else the first one reported before the launcher
    ends the step: later lines may name ranks that did not fail.
    """
    failures = list(failures_in(lines))
    abort_code = _first(MPI_ABORT_CODE, lines)
    for sign in (PMIX_LOST, MPI_ABORT):
        named = _first(sign, lines)
        for _, failure in failures if named is not None else ():
            if named is not None and _includes(failure.rank, int(named["rank"])):
                if sign is MPI_ABORT and abort_code is not None:
                    # It may have been killed with the others before it could end with its code.
                    return replace(failure, exit_code=int(abort_code["code"]), signal=None)
                return failure
    return _first_failure(lines)


def _hydra_failure(evidence: Evidence) -> RankFailure | None:
    """Returns the rank that `hpctrain launch` has found, if Hydra reports that a signal has ended a rank."""
    return None if _first(HYDRA_SIGNAL, evidence.lines) is None else evidence.failure


def _first_failure(lines: Sequence[str]) -> RankFailure | None:
    """Returns the first rank that is reported as failed before the launcher ends the step."""
    step_ends = next((index for index, line in enumerate(lines) if STEP_ENDS.search(line)), len(lines))
    return next((failure for index, failure in failures_in(lines) if index < step_ends), None)


def _includes(ranks: str, rank: int) -> bool:
    """Returns True if the list `ranks`, such as `0-1,5`, includes `rank`."""
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        if int(first) <= rank <= int(last or first):
            return True
    return False


def _is_consequence(lines: Sequence[str]) -> bool:
    """Returns True if the first exception reports that another rank, or the connection to it, is lost."""
    exception = _first(EXCEPTION, lines)
    return exception is not None and BROKEN_CONNECTION.search(exception.string) is not None


def _error_text(lines: Sequence[str]) -> str:
    """Returns the exception of the first traceback, or else hpctrain's first message; "" if there is neither."""
    in_traceback = False
    for line in lines:
        in_traceback = in_traceback or TRACEBACK.search(line) is not None
        if in_traceback and EXCEPTION.search(line):
            return line.strip()
    for sign in (RANK_SAYS, SAYS):
        match = _first(sign, lines)
        if match is not None:
            return str(match["text"])
    return ""


def _fingerprint(text: str) -> str:
    """Returns the text without numbers, addresses and extra white space, which differ between equal errors."""
    return " ".join(re.sub(r"0x[0-9a-f]+|\d+", "#", text).split())[:300]


def _first(sign: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := sign.search(line))), None)
