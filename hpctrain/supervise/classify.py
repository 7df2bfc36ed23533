"""The failure classifier: from what is known about the end of an attempt to its cause. Pure.

What is certain comes first: a normal end, a stop that was asked for, nodes that do not answer. Then the text that
names a resource (memory, disk). Then who failed first: the rank that says in our own words that it ends the run; the
rank that a signal has ended; the rank that has exited with a code. The others are ended because of it: where srun says
`Killed` it names the victim, and by `Terminated`, or after a line that the step is being ended, the innocent. The
kernel's counter of processes that it has ended for want of memory says why a rank was killed, and nothing else: it
counts those of other jobs on the node too.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import ExitCode
from hpctrain.launch import CAUSES, RankFailure, signal_name
from hpctrain.supervise import signs
from hpctrain.supervise.causes import Cause, Diagnosis

# A warning before the time limit may come so much earlier; SIGTERM comes at the limit itself.
_WARNED_BEFORE_S = 900.0
_AT_THE_LIMIT_S = 60.0
_CAUSE_OF_CODE = {
    ExitCode.USAGE: Cause.USER_ERROR,
    ExitCode.DATA: Cause.DATA,
    ExitCode.CHECKPOINT: Cause.CHECKPOINT,
    ExitCode.LAUNCH: Cause.USER_ERROR,
    ExitCode.DIVERGED: Cause.USER_ERROR,
    ExitCode.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about the end of an attempt.

    exit_code: of mpirun or srun, 128 + n for signal n; None: not known, since the supervisor was ended too. lines:
    that the launcher and the ranks printed to stderr, in order, and our own last records, as lines. failure: the rank
    that `hpctrain launch` found to have failed first; it is used where Hydra does not name one. ended,
    time_limit: epoch; the limit is None if there is none. signals: names of those that asked the supervisor to stop,
    in order. nodes: of the attempt, in Slurm's order. silent_nodes: those that do not answer any more.
    answering_nodes: those that did after the end. oom_nodes: on which the kernel has ended processes for want of
    memory meanwhile. overdue_s: training had not begun so many seconds after the launch, which was ended for that.
    preempted: Slurm says that it has preempted the job.
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
    """Returns the cause of the attempt's end."""
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
    return Diagnosis(cause=Cause.UNKNOWN, reason=reason)


def _wanted_end(evidence: Evidence) -> Diagnosis | None:
    """Judges an intended end: by the command itself, by the user, or by Slurm."""
    if evidence.exit_code == ExitCode.DONE:
        return Diagnosis(cause=Cause.FINISHED, reason="the command ended with 0")
    for sign, cause in ((signs.TIME_LIMIT, Cause.WALL_CLOCK), (signs.PREEMPTED, Cause.PREEMPTION)):
        match = _first(sign, evidence.lines)
        if match is not None:
            return Diagnosis(cause=cause, reason=match.string)
    left_s = float("inf") if evidence.time_limit is None else evidence.time_limit - evidence.ended
    if evidence.exit_code is None and left_s < _AT_THE_LIMIT_S:
        return Diagnosis(cause=Cause.WALL_CLOCK, reason="the time limit of the job was over")
    if evidence.exit_code in CAUSES:
        return None  # a rank failed while the others stopped
    if not evidence.signals and (
        evidence.exit_code != ExitCode.STOPPED_EARLY or evidence.overdue_s is not None
    ):
        return None
    saved = _first(signs.STOPPED, evidence.lines)
    asked = evidence.signals[0] if evidence.signals else (saved["reason"] if saved else "unknown reason")
    how = f"stopped ({asked})" + (", the state is saved" if saved else "")
    if saved is not None and signs.TIME_OVER.search(saved["reason"]):
        return Diagnosis(cause=Cause.WALL_CLOCK, reason=f"stopped ({saved['reason']}), the state is saved")
    if evidence.preempted:
        return Diagnosis(cause=Cause.PREEMPTION, reason=f"{how}: Slurm has preempted the job")
    at_limit_s = _AT_THE_LIMIT_S if asked.startswith("SIGTERM") else _WARNED_BEFORE_S
    if left_s < at_limit_s and not asked.startswith(("SIGINT", "SIGHUP")):
        return Diagnosis(
            cause=Cause.WALL_CLOCK, reason=f"{how}, {max(0.0, left_s):.0f} s before the time limit"
        )
    if asked.startswith("SIGUSR1"):
        return Diagnosis(cause=Cause.PREEMPTION, reason=f"{how}, long before any time limit")
    return Diagnosis(cause=Cause.CANCELLED, reason=how)


def _lost_node(evidence: Evidence) -> Diagnosis | None:
    silent = tuple(node for node in evidence.nodes if node in evidence.silent_nodes)
    found: dict[str, str] = {}  # node, or "" -> the line that says that it is lost
    for line in evidence.lines:
        name = signs.lost_node_in(line)
        if name is not None:
            found.setdefault(_name_of(name, evidence.nodes), line)
        elif signs.STEP_ENDS.search(line) or signs.RANK_ENDS.search(line):
            break  # what breaks off after this breaks off because of it
    named = tuple(node for node in found if node)
    reason = next((line for node, line in found.items() if node), next(iter(found.values()), ""))
    if silent:
        return Diagnosis(
            cause=Cause.LOST_NODE,
            reason=reason or f"{', '.join(silent)} does not answer any more",
            nodes=silent,
        )
    if not found:
        return None
    if all(map(signs.STEPD_GONE.search, found.values())) and {*named} <= {*evidence.answering_nodes}:
        # The node works: Slurm's daemon of the step was killed there, and the ranks with it.
        return Diagnosis(cause=Cause.LOST_RANK, reason=reason, nodes=named)
    return Diagnosis(cause=Cause.LOST_NODE, reason=reason, nodes=named)


def _name_of(name: str, nodes: Sequence[str]) -> str:
    """Returns the node's name, also for `#2`, number 2 of the step's nodes; "" if it is not known."""
    if not name.startswith("#"):
        return name
    number = int(name[1:])
    return nodes[number] if number < len(nodes) else ""


def _resources(evidence: Evidence) -> Diagnosis | None:
    """Judges by the first line that says that memory or disk is used up."""
    for line in evidence.lines:
        if signs.OUT_OF_MEMORY.search(line):
            victim = _first(signs.SRUN_OUT_OF_MEMORY, evidence.lines)
            nodes = (victim["node"],) if victim else ()
            # hpctrain has met it itself, and could not divide the batch any further: it will come again.
            error = _fingerprint(line) if evidence.exit_code == ExitCode.OUT_OF_MEMORY else ""
            return Diagnosis(cause=Cause.OUT_OF_MEMORY, reason=line.strip(), nodes=nodes, error=error)
        if signs.DISK_FULL.search(line):
            return Diagnosis(cause=Cause.DISK_FULL, reason=line.strip(), error=_fingerprint(line))
    return None


def _by_counter(found: Diagnosis | None, evidence: Evidence) -> Diagnosis | None:
    """Returns what the kernel's counter says of a rank that was killed, or that ended without a word; None if something
    else ended the ranks. found: what the lines say."""
    says_nothing = found is None or (found.cause is Cause.LOST_RANK and "(SIG" not in found.reason)
    first = _first_failure(evidence.lines) or _hydra_failure(evidence)
    was_killed = first is not None and first.signal == signal.SIGKILL
    of_a_killed_process = found is not None and re.search(r"SIGKILL|signal: Killed", found.reason) is not None
    if not evidence.oom_nodes or not (says_nothing or was_killed or of_a_killed_process):
        return None
    names = ", ".join(evidence.oom_nodes)
    return Diagnosis(
        cause=Cause.OUT_OF_MEMORY,
        reason=f"the kernel of {names} has ended processes for want of memory",
        nodes=tuple(evidence.oom_nodes),
    )


def _who_failed(evidence: Evidence) -> Diagnosis | None:
    lines = evidence.lines
    own, text = _first(signs.RANK_ENDS, lines), _error_text(lines)
    if own is not None and int(own["code"]) != ExitCode.COMMUNICATION and not _is_consequence(lines):
        return _by_code(int(own["code"]), text=text or own.string, evidence=evidence)
    hydra, peer = _first(signs.HYDRA_SIGNAL, lines), _first(signs.PEER_GONE, lines)
    victim = _victim(lines) or _hydra_failure(evidence)
    if victim is not None and (victim.signal is not None or (hydra is not None and victim.exit_code > 128)):
        by = "a signal" if victim.signal is None else signal_name(victim.signal)
        reason = f"rank {victim.rank} on {victim.node} was ended by {by}"
        return Diagnosis(cause=Cause.LOST_RANK, reason=reason, nodes=(victim.node,))
    if hydra is not None and victim is None:
        node = _first(signs.HYDRA_NODE, lines)
        reason = f"a rank was ended by {signal_name(int(hydra['mpich'] or hydra['intel']))}"
        return Diagnosis(cause=Cause.LOST_RANK, reason=reason, nodes=(node["node"],) if node else ())
    if victim is None and own is None and peer is not None:
        on = f" on {peer['node']}" if peer["node"] else ""
        reason = f"the other ranks have lost the connection to a rank{on}"
        return Diagnosis(cause=Cause.LOST_RANK, reason=reason, nodes=(peer["node"],) if peer["node"] else ())
    if evidence.overdue_s is not None:
        return Diagnosis(
            cause=Cause.HANG, reason=f"training had not begun {evidence.overdue_s:.0f} s after the launch"
        )
    if own is not None:
        return _by_code(int(own["code"]), text=text, evidence=evidence)
    if victim is not None:
        return _by_code(victim.exit_code, text=text, evidence=evidence)
    cancelled = _first(signs.STEP_CANCELLED, lines)
    # Slurm 24.11 also says so when a rank ends all after a hang, before it says how any has ended.
    if cancelled is not None and not text and _first(signs.HANG, lines) is None:
        return _cancelled_or_killed(cancelled.string, lines)
    code = evidence.exit_code
    says_so = text or _first(signs.MPIRUN_EXIT_CODE, lines) is not None
    if code is None or not (says_so or code > 128 or code in ExitCode.__members__.values()):
        return None
    return _by_code(code, text=text, evidence=evidence)


def _cancelled_or_killed(cancelled: str, lines: Sequence[str]) -> Diagnosis:
    """Judges a step that Slurm says it has cancelled, although nobody has asked the supervisor to stop.

    Slurm 24.11 prints the same for a killed rank and for `scancel JOB.STEP`: first that the step is cancelled, then
    that a task was killed. Who wants the run to end can say so to the supervisor; a killed rank cannot.
    """
    killed = next(
        (failure for _, failure in signs.failures_in(lines) if failure.signal == signal.SIGKILL), None
    )
    if killed is None:
        return Diagnosis(cause=Cause.CANCELLED, reason=cancelled)
    reason = (
        f"rank {killed.rank} on {killed.node} was killed, or somebody has cancelled the step: {cancelled}"
    )
    return Diagnosis(cause=Cause.LOST_RANK, reason=reason, nodes=(killed.node,))


def _by_code(code: int, *, text: str, evidence: Evidence) -> Diagnosis | None:
    """Judges by the exit code of the rank that failed first. text: what it printed."""
    if code == ExitCode.COMMUNICATION:
        return _communication(evidence, text=text)
    if code > 128 and not text:
        return Diagnosis(cause=Cause.LOST_RANK, reason=f"a rank was ended by {signal_name(code - 128)}")
    cause = Cause.USER_ERROR
    if code in ExitCode.__members__.values():
        cause = _CAUSE_OF_CODE.get(ExitCode(code), Cause.USER_ERROR)
    reason = text or f"a rank ended with exit code {code}"
    return Diagnosis(cause=cause, reason=reason, error=_fingerprint(reason))


def _communication(evidence: Evidence, *, text: str) -> Diagnosis:
    different = _first(signs.DIFFERENT_CALLS, evidence.lines)
    if different is not None:
        return Diagnosis(
            cause=Cause.USER_ERROR, reason=different.string.strip(), error=_fingerprint(different.string)
        )
    hang = _first(signs.HANG, evidence.lines)
    if hang is not None:
        late = [match for line in evidence.lines if (match := signs.DID_NOT_COME.search(line))]
        named = late[0].string.strip() if late else hang.string.strip()
        return Diagnosis(
            cause=Cause.HANG, reason=named, nodes=tuple(dict.fromkeys(match["node"] for match in late))
        )
    return Diagnosis(cause=Cause.LOST_RANK, reason=text or "communication between the ranks failed")


def _victim(lines: Sequence[str]) -> RankFailure | None:
    """Returns the rank that failed first, according to the launcher.

    It is named by Slurm's PMIx plugin or by MPI_Abort, or else is the first that is reported before the step is being
    ended: later lines may name the innocent.
    """
    failures = list(signs.failures_in(lines))
    abort_code = _first(signs.MPI_ABORT_CODE, lines)
    for sign in (signs.PMIX_LOST, signs.MPI_ABORT):
        named = _first(sign, lines)
        for _, failure in failures if named is not None else ():
            if named is not None and _includes(failure.rank, int(named["rank"])):
                if sign is signs.MPI_ABORT and abort_code is not None:
                    # It may have been killed with the others before it could end with its code.
                    return replace(failure, exit_code=int(abort_code["code"]), signal=None)
                return failure
    return _first_failure(lines)


def _hydra_failure(evidence: Evidence) -> RankFailure | None:
    """Returns the rank that `hpctrain launch` found where Hydra says that a signal has ended one."""
    return None if _first(signs.HYDRA_SIGNAL, evidence.lines) is None else evidence.failure


def _first_failure(lines: Sequence[str]) -> RankFailure | None:
    """Returns the rank that is reported first as failed, before the step is being ended."""
    step_ends = next((index for index, line in enumerate(lines) if signs.STEP_ENDS.search(line)), len(lines))
    return next((failure for index, failure in signs.failures_in(lines) if index < step_ends), None)


def _includes(ranks: str, rank: int) -> bool:
    """Returns True if the list `ranks`, such as `0-1,5`, includes `rank`."""
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        if int(first) <= rank <= int(last or first):
            return True
    return False


def _is_consequence(lines: Sequence[str]) -> bool:
    """Returns True if the first exception says that another rank, or the connection to it, is gone."""
    exception = _first(signs.EXCEPTION, lines)
    return exception is not None and signs.BROKEN_CONNECTION.search(exception.string) is not None


def _error_text(lines: Sequence[str]) -> str:
    """Returns the exception of the first traceback, or else the first message of hpctrain; "" if there is neither."""
    in_traceback = False
    for line in lines:
        in_traceback = in_traceback or signs.TRACEBACK.search(line) is not None
        if in_traceback and signs.EXCEPTION.search(line):
            return line.strip()
    for sign in (signs.RANK_SAYS, signs.SAYS):
        match = _first(sign, lines)
        if match is not None:
            return str(match["text"])
    return ""


def _fingerprint(text: str) -> str:
    """Returns the text without what differs from time to time: numbers, addresses, spaces."""
    return " ".join(re.sub(r"0x[0-9a-f]+|\d+", "#", text).split())[:300]


def _first(sign: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := sign.search(line))), None)
