"""Conclusions about each rank from the files of the nodes: which ranks are absent or hung, or passed other arguments.

A slow rank is not hung: a rank that computes, or waits for a file, is left alone until the run's own time limit
(docs/adr/0036). Everything except `activities` is pure.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from hpctrain.comm.collectives.agreement import describe_ranks
from hpctrain.comm.watchdog.board.short_stacks import StackGroup, fold_stacks, without_stack
from hpctrain.topology import Topology

GONE = "has ended"
STOPPED = "is stopped"
_IN_KERNEL = "waits in the kernel, as for a file"
_STATES = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: STOPPED,
    psutil.STATUS_ZOMBIE: GONE,
    psutil.STATUS_DEAD: GONE,
    psutil.STATUS_DISK_SLEEP: _IN_KERNEL,
    psutil.STATUS_SLEEPING: "sleeps",
    psutil.STATUS_IDLE: "sleeps",
    psutil.STATUS_RUNNING: "computes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the operating system reports about the process of a rank.

    state: description for messages; "" if unknown.
    cpu_s: processor time in seconds of the process and of the processes that it started, such as compilers.
    looked: time of the observation, in seconds since 1970.
    """

    state: str
    cpu_s: float
    looked: float

    @property
    def may_be_hung(self) -> bool:
        """False if the process computes now, or if the operating system itself is busy with it."""
        return self.state in (GONE, STOPPED, "sleeps")

    @property
    def is_over(self) -> bool:
        """True if the process has ended, or is stopped until a signal continues it."""
        return self.state in (GONE, STOPPED)


def activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Returns what each of the processes `pids` of this node does, by process id.

    Takes some milliseconds per 100 processes on the node.
    """
    started: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        started[process.info["ppid"]].append(process)
    return {pid: _activity(pid, started, now=time.time()) for pid in pids}


def _activity(pid: int, started: dict[int, list[psutil.Process]], *, now: float) -> Activity:
    try:
        process = psutil.Process(pid)
        state, cpu_s = _STATES.get(process.status(), ""), _cpu_s(process)
    except psutil.NoSuchProcess:
        return Activity(state=GONE, cpu_s=0.0, looked=now)
    except psutil.Error:
        return Activity(state="", cpu_s=0.0, looked=now)
    descendants, seen = list(started[pid]), {pid}
    while descendants:
        child = descendants.pop()
        if child.pid not in seen:  # a number may have been given to another process meanwhile
            seen.add(child.pid)
            cpu_s += _cpu_s(child)
            descendants += started[child.pid]
    return Activity(state=state, cpu_s=cpu_s, looked=now)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """One rank's progress in one communicator.

    sequence: number of operations that the rank has started on the communicator.
    operation: name of the last operation that was started.
    waiting_s: seconds since that operation started; None if it is complete.
    signature: text with the operation's arguments, which must be equal on all ranks; None if ranks do not compare it.
    num_ranks: size of the communicator.
    """

    sequence: int
    operation: str
    waiting_s: float | None  # None: the operation is complete
    signature: str | None = None  # must be equal on all ranks in the operation; None: not compared
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Contents of one rank's file: the position of the rank, which is what it does now.

    pid: process id; None if the rank has written no file.
    written: time of writing by the writer's clock, in seconds since 1970.
    doing: label of the current activity.
    groups: progress in each communicator, by its name.
    reached: for each other host, whether it answered the last probe.
    leaving: True if the rank is ready to exit: it has printed its report, or another rank prints the report for it.
    section: section of the run that the rank is in; "" for none.
    stack: short stack, one line.
    activity: what the rank's process does, added by a rank of the node that reads the file; None if it was not added.
    """

    rank: int
    host: str
    pid: int | None
    written: float  # seconds since the epoch, by the writer's clock
    step: int | None = None
    doing: str = ""  # label of its current activity
    groups: dict[str, GroupPosition] = field(default_factory=dict)
    reached: dict[str, bool] = field(default_factory=dict)
    leaving: bool = False
    section: str = ""
    stack: str = ""
    activity: Activity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNodes:
    """The node of each rank.

    node_of_rank: index of the node on which each rank runs.
    node_names: name of each node.
    """

    node_of_rank: Sequence[int]
    node_names: Sequence[str]

    @property
    def num_nodes(self) -> int:
        return len(self.node_names)

    def ranks_on(self, node: int) -> list[int]:
        """Returns the ranks of one node, ascending."""
        return [rank for rank, found in enumerate(self.node_of_rank) if found == node]

    def nodes_of(self, ranks: Sequence[int]) -> list[int]:
        """Returns the nodes of these ranks, ascending."""
        return sorted({self.node_of_rank[rank] for rank in ranks})


def nodes_of_ranks(
    host_of_rank: Sequence[int], *, names: Sequence[str], topology: Topology | None = None
) -> RankNodes:
    """Returns the node of each rank: its host or, if `topology` is given, its node in `topology`, split by hosts.

    host_of_rank: for each rank, the index of its host.
    names: name of each host.
    """
    if topology is None:
        return RankNodes(node_of_rank=host_of_rank, node_names=names)
    pairs = list(zip(topology.node_of_rank, host_of_rank, strict=True))
    number_of = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    return RankNodes(
        node_of_rank=[number_of[pair] for pair in pairs],
        node_names=[topology.node_names[node] for node, _ in number_of],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What the files of some nodes contain at one moment.

    by_rank: position of each rank that has written a file, except of ranks on silent nodes. The time `written` of each
    position is converted to the reader's clock.
    silent_nodes: nodes without a recent file, with the age in seconds of the last file; None if there is no file.
    unread_nodes: indices of the nodes whose file could not be read in time.
    reached: reached[a][b] is True if host b answered a probe from host a.
    """

    by_rank: Mapping[int, RankPosition]
    silent_nodes: Mapping[int, float | None] = field(default_factory=dict)
    unread_nodes: Collection[int] = ()
    reached: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that have not started an operation, or are silent: a single rank, or all ranks of a silent node.

    place: node or host of the ranks, and the process id if it is known.
    state: description of what the ranks did last.
    silent_s: seconds since the ranks last wrote a file; None if the file is recent.
    """

    ranks: tuple[int, ...]
    place: str
    state: str
    silent_s: float | None = None

    @property
    def text(self) -> str:
        silent = "" if self.silent_s is None else f", last heard of {self.silent_s:.0f} s ago"
        return f"{describe_ranks(self.ranks)} on {self.place} {self.state}{silent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangEvidence:
    """What a rank that ends the run has found in the files of all nodes.

    cut: lines about hosts that are cut off, from `hpctrain.comm.watchdog.host_probe.find_cut`.
    absent: ranks that have not started the operation.
    waiting: ranks that wait in the same operation.
    unread: names of nodes whose file could not be read.
    stacks: stacks of the absent and of the waiting ranks.
    """

    cut: Sequence[str] = ()
    absent: Sequence[Absence] = ()
    waiting: Sequence[int] = ()
    unread: Sequence[str] = ()
    stacks: Sequence[StackGroup] = ()


def find_absent(
    positions: Positions,
    *,
    members: Sequence[int],
    placement: RankNodes,
    group: str,
    sequence: int,
    now: float,
    usual_silence_s: float,
    waited_s: float,
) -> list[Absence]:
    """Returns the `members` that, by their files, have not started operation `sequence` of the communicator `group`.

    A rank without a file counts as absent. The ranks of a silent node (a node without a recent file) form one
    `Absence`. Ranks of a node whose file could not be read are left out.

    now: current time, in seconds since 1970.
    usual_silence_s: if a rank's file is older than this, in seconds, the message states how long the rank has been
    silent.
    waited_s: seconds since the operation started. The stated silence is at most this long if there was a previous
    operation, because the rank was alive then.
    """
    at_most_s = waited_s if sequence > 1 else None
    absent = []
    on_silent_nodes: dict[int, list[int]] = defaultdict(list)
    for rank in members:
        position = positions.by_rank.get(rank)
        if position is None:
            node = placement.node_of_rank[rank]
            if node in positions.silent_nodes:
                on_silent_nodes[node].append(rank)
                continue
            if node in positions.unread_nodes:
                continue
            position = RankPosition(
                rank=rank, host=placement.node_names[node], pid=None, written=now - waited_s
            )
        place = position.groups.get(group, GroupPosition(sequence=0, operation="nothing", waiting_s=None))
        if place.sequence >= sequence:
            continue
        silent_s = _at_most(now - position.written, at_most_s)
        is_silent = silent_s > usual_silence_s
        state = _whereabouts(position, place, sequence=sequence, is_old=is_silent or position.pid is None)
        absent.append(
            Absence(
                ranks=(rank,), place=_place(position), state=state, silent_s=silent_s if is_silent else None
            )
        )
    before = (
        "did not begin it"
        if sequence == 1
        else f"finished number {sequence - 1} of this group but did not begin this one"
    )
    for node, ranks in on_silent_nodes.items():
        absent.append(
            Absence(
                ranks=tuple(ranks), place=placement.node_names[node],
                state=f"{before}, and no rank of this node has written anything since",
                silent_s=_at_most(positions.silent_nodes[node], waited_s),
            )
        )  # fmt: skip
    return sorted(absent, key=lambda absence: absence.ranks[0])


def find_silent(
    positions: Positions,
    *,
    ranks: Sequence[int],
    placement: RankNodes,
    now: float,
    usual_silence_s: float,
    waited_s: float,
) -> list[Absence]:
    """Returns those of `ranks` whose file is older than `usual_silence_s` seconds: they are stopped or cut off.

    A stopped rank also blocks groups to which it does not belong if the backend serves all groups in one thread, as
    Horovod does.
    """
    silent = []
    on_silent_nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        position = positions.by_rank.get(rank)
        if position is None:
            on_silent_nodes[placement.node_of_rank[rank]].append(rank)
            continue
        silent_s = min(now - position.written, waited_s)
        if silent_s > usual_silence_s:
            silent.append(
                Absence(
                    ranks=(rank,),
                    place=_place(position),
                    state="has written nothing since",
                    silent_s=silent_s,
                )
            )
    for node, found in on_silent_nodes.items():
        silent_s = _at_most(positions.silent_nodes.get(node), waited_s)
        if node in positions.silent_nodes and silent_s > usual_silence_s:
            state = "wrote nothing since then, and neither did any other rank of this node"
            silent.append(
                Absence(ranks=tuple(found), place=placement.node_names[node], state=state, silent_s=silent_s)
            )
    return sorted(silent, key=lambda absence: absence.ranks[0])


def find_waiting(positions: Positions, *, members: Sequence[int], group: str, sequence: int) -> list[int]:
    """Returns the `members` that, by their files, wait in operation `sequence` of the communicator `group`."""
    return [
        rank
        for rank in members
        if (position := positions.by_rank.get(rank)) is not None
        and (place := position.groups.get(group)) is not None
        and place.sequence == sequence
        and place.waiting_s is not None
    ]


def find_stacks(
    positions: Positions, *, absent: Sequence[Absence], waiting: Sequence[int]
) -> list[StackGroup]:
    """Returns the stacks of the `absent` and the `waiting` ranks, with equal stacks grouped."""
    late: dict[int, str] = {}
    for absence in absent:
        for rank in absence.ranks:
            position = positions.by_rank.get(rank)
            if position is None and len(absence.ranks) > 1:
                late[rank] = f"no stack: no rank of {absence.place} writes"
            elif position is None or absence.silent_s is not None:
                activity = None if position is None else position.activity
                late[rank] = without_stack("" if activity is None else activity.state)
            else:
                late[rank] = position.stack
    return fold_stacks(late, {rank: positions.by_rank[rank].stack for rank in waiting})


def _at_most(silent_s: float | None, at_most_s: float | None) -> float:
    return min(found for found in (silent_s, at_most_s) if found is not None)


def _place(position: RankPosition) -> str:
    return position.host if position.pid is None else f"{position.host} (process {position.pid})"


def _whereabouts(position: RankPosition, place: GroupPosition, *, sequence: int, is_old: bool) -> str:
    if place.sequence < sequence - 1 and is_old:
        # A rank writes its file when it makes no progress, and this one has passed operations since.
        return f"finished number {sequence - 1} of this group but did not begin this one, and has written nothing since"
    step = "" if position.step is None else f" in step {position.step}"
    step += f" ({position.doing})" if position.doing else ""
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if position.pid is None:
        return "has begun no operation of this group and has written nothing"
    if place.sequence == 0:
        return f"has begun no operation of this group and waits in no other{step}"
    return f"has finished {place.operation} number {place.sequence} of this group and waits in no operation{step}"


# A process that has used less than this share of one core is idle: the threads of the watchdog use less.
_IDLE_SHARE = 0.05
_IDLE_FOR = 1 / 8  # share of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLimits:
    """Seconds of waiting after which a late rank may be judged as hung. None means never.

    here_s: limit for a rank whose process is stopped or has ended, or whose node does not answer, in any section.
    everywhere_s: limit for a rank whose section is not known.
    of: function that takes the name of a section, and returns the limit for a rank in this section.
    """

    here_s: float
    everywhere_s: float | None
    of: Callable[[str], float | None]


class IdleSince:
    """Tracks for how long each rank's process has used no processor, from repeated readings of its CPU time."""

    def __init__(self) -> None:
        self._last: dict[int, Activity] = {}

    def update(self, positions: Positions) -> None:
        """Adds newly read positions of the ranks. A position contains the CPU time of the rank's process."""
        for rank, position in positions.by_rank.items():
            if position.activity is not None and not self._is_idle(rank, position.activity):
                self._last[rank] = position.activity

    def seconds(self, rank: int, now: Activity) -> float:
        """Returns for how many seconds the process of `rank` is known to have used no processor."""
        last = self._last.get(rank)
        return 0.0 if last is None else now.looked - last.looked

    def _is_idle(self, rank: int, now: Activity) -> bool:
        last = self._last.get(rank)
        if last is None:
            return False
        # Less than before: a process that it has started has ended, so that it does something.
        return 0.0 <= now.cpu_s - last.cpu_s <= _IDLE_SHARE * max(1.0, now.looked - last.looked)


def find_hung(
    absences: Sequence[Absence],
    *,
    now: Positions,
    idle: IdleSince,
    placement: RankNodes,
    answers: Mapping[str, bool],
    group: str,
    waited_s: float,
    limits: EarlyLimits,
) -> list[str]:
    """Returns one text per hung rank, with the reason; empty if no rank is hung.

    absences: ranks that have not started an operation of `group`.
    now: newly read positions of the ranks.
    idle: record of the ranks' CPU times, which already contains `now`.
    answers: for each probed host, whether it answered.
    waited_s: seconds since the operation started.
    """
    hung = []
    for absence in absences:
        position = now.by_rank.get(absence.ranks[0])
        if position is None:
            node = placement.node_names[placement.node_of_rank[absence.ranks[0]]]
            if waited_s > limits.here_s and answers.get(node) is False:
                hung.append(f"{node} does not answer")
            continue
        is_silent = absence.silent_s is not None
        why = _why_hung(
            position, idle=idle, is_silent=is_silent, group=group, waited_s=waited_s, limits=limits
        )
        if why is not None:
            hung.append(f"rank {position.rank} on {position.host} {why}")
    return hung


def _why_hung(
    position: RankPosition,
    *,
    idle: IdleSince,
    is_silent: bool,
    group: str,
    waited_s: float,
    limits: EarlyLimits,
) -> str | None:
    activity = position.activity
    if activity is None or not activity.may_be_hung:
        return None
    if activity.is_over:
        return activity.state if waited_s > limits.here_s else None
    if any(place.waiting_s is not None for name, place in position.groups.items() if name != group):
        return None  # it waits for others itself
    limit_s = limits.everywhere_s if is_silent else limits.of(position.section)
    idle_s = idle.seconds(position.rank, activity)
    if limit_s is None or waited_s <= limit_s or idle_s < _IDLE_FOR * limits.here_s:
        return None
    what = "its interpreter is blocked" if is_silent else f"it waits in no operation ({position.section})"
    return f"has used no CPU time for {idle_s:.0f} s, and {what}"


# Ranks in one operation must have passed equal arguments. Their signatures are compared after this time in it.
_COMPARE_AFTER_S = 2.0
COMPARE_AT_MOST_AFTER_S = 4.0
_COMPARISONS = 3  # per operation, since ranks enter it and renew their files at different times


@dataclass(slots=True)
class ComparisonSchedule:
    """Decides when the ranks' arguments of a long operation are compared. timeout_s: time limit of an operation."""

    timeout_s: float
    _after_s: float = field(init=False)
    _compared: dict[str, tuple[int, int]] = field(default_factory=dict)  # group -> sequence, times

    def __post_init__(self) -> None:
        self._after_s = min(_COMPARE_AFTER_S, self.timeout_s / 4)

    def due(self, positions: Iterable[RankPosition]) -> dict[str, int]:
        """Returns the communicators for whose current operation the ranks' arguments must be compared now.

        Maps each communicator's name to the number of comparisons of the same operation that remain afterwards.

        positions: what each rank of one node is doing.
        """
        longest: dict[str, GroupPosition] = {}
        for position in positions:
            for group, place in position.groups.items():
                if place.waiting_s is not None and place.signature is not None:
                    longest[group] = max(longest.get(group, place), place, key=_progress_of)
        left = {group: self._left(group, place) for group, place in longest.items()}
        return {group: number for group, number in left.items() if number is not None}

    def _left(self, group: str, place: GroupPosition) -> int | None:
        sequence, times = self._compared.get(group, (0, 0))
        if sequence != place.sequence and times:
            # The compared operation was only slow, and the next may be too: compare later, to save file accesses.
            del self._compared[group]
            self._after_s = min(COMPARE_AT_MOST_AFTER_S, self.timeout_s / 4, 2 * self._after_s)
            times = 0
        if times == _COMPARISONS or (place.waiting_s or 0.0) < (1 + times / 2) * self._after_s:
            return None
        self._compared[group] = (place.sequence, times + 1)
        return _COMPARISONS - times - 1


def _progress_of(place: GroupPosition) -> tuple[int, float]:
    return place.sequence, place.waiting_s or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureMismatch:
    """Ranks in one operation of `group` that have different signatures, which means that they passed other arguments.

    ranks: all ranks in the operation.
    text: error message.
    """

    group: str
    sequence: int
    ranks: tuple[int, ...]
    text: str


def find_mismatch(
    positions: Mapping[int, RankPosition], *, decided: Collection[str] = ()
) -> SignatureMismatch | None:
    """Returns the first operation whose ranks have different signatures (texts with the arguments); None if all agree.

    The most frequent signature counts as correct. If several signatures are equally frequent, that of the lowest rank
    counts as correct; this case is reported only if all ranks of the group are in the operation, or the group is in
    `decided`. Otherwise the next rank that starts the operation may decide which signature is the most frequent.

    decided: communicators that will not be compared again for this operation.
    """
    held: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    members: dict[str, int] = {}
    for rank in sorted(positions):
        for group, place in positions[rank].groups.items():
            if place.waiting_s is not None and place.signature is not None:
                held[group, place.sequence][rank] = place.signature
                members[group] = place.num_ranks
    for (group, sequence), signatures in held.items():
        counts = Counter(signatures.values())
        usual, num_usual = counts.most_common(1)[0]  # the first seen of equally frequent ones
        is_tie = 2 * num_usual <= len(signatures)
        if len(counts) == 1 or (is_tie and len(signatures) < members[group] and group not in decided):
            continue
        different = [
            f"rank {rank} on {positions[rank].host} has {signature}"
            for rank, signature in signatures.items()
            if signature != usual
        ]
        text = (
            f"ranks called number {sequence} of {group} with different arguments: {', '.join(different[:8])}, "
            f"where {num_usual} of {len(signatures)} have {usual}"
        )
        return SignatureMismatch(group=group, sequence=sequence, ranks=tuple(signatures), text=text)
    return None
