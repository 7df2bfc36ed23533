"""What is known of each rank: its position, what its processes do, whether it hangs, and whether its arguments
differ.
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

# What the operating system says of the processes of a node's ranks, whatever these say themselves.


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
    """What a process does. state: for the reader, "" if it is not known. cpu_s: processor time of it and of processes
    that it started, as compilers. looked: when that was so (epoch)."""

    state: str
    cpu_s: float
    looked: float

    @property
    def may_be_hung(self) -> bool:
        """False for what the operating system itself is busy with, and for what computes now."""
        return self.state in (GONE, STOPPED, "sleeps")

    @property
    def is_over(self) -> bool:
        """True if the process is stopped, until it is continued by a signal, or gone."""
        return self.state in (GONE, STOPPED)


def activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Returns what the processes `pids` of this node do. Costs some milliseconds for each 100 processes of the node."""
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


# Position of each rank: which operation of which communicator it is in, and which ranks are not in it. All
# pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """One rank's place in one communicator, of `num_ranks`. sequence: operations begun on it, 0 before the first."""

    sequence: int
    operation: str
    waiting_s: float | None  # None: the operation is complete
    signature: str | None = None  # must be equal on all ranks in the operation; None: not compared
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Contents of one rank's file.

    pid: None if the rank has written no file. reached: for each other host, whether it answered the last probe.
    leaving: the rank has printed its report, or another rank prints it. section: of the run, "" for none. stack: short,
    one line. activity: of its process, which another rank of its node has added; None if it has not.
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
class Placement:
    """Which rank is on which node. node_of_rank: index of each rank's node, by rank. node_names: by index."""

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


def place_ranks(
    host_of_rank: Sequence[int], *, names: Sequence[str], topology: Topology | None = None
) -> Placement:
    """Returns the placement of ranks on hosts, called `names`, whose ranks are divided as in `topology`, if given."""
    if topology is None:
        return Placement(node_of_rank=host_of_rank, node_names=names)
    pairs = list(zip(topology.node_of_rank, host_of_rank, strict=True))
    number_of = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    return Placement(
        node_of_rank=[number_of[pair] for pair in pairs],
        node_names=[topology.node_names[node] for node, _ in number_of],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What the files of some nodes say at one moment.

    by_rank: of the ranks that have written a file, on nodes that write; `written` by the reader's clock.
    silent_nodes: node without a recent file -> seconds since its last one, None if it has written none.
    unread_nodes: their files could not be read in time. reached: host -> other host -> whether it answered a probe.
    """

    by_rank: Mapping[int, RankPosition]
    silent_nodes: Mapping[int, float | None] = field(default_factory=dict)
    unread_nodes: Collection[int] = ()
    reached: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that have not begun an operation, or are silent: one, or those of a node on which all are silent.

    place: their node or host, and the process, if known. state: what was done last. silent_s: since they were last
    heard of; None: recently.
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
class Finding:
    """What a rank that ends the run has found in the files of all nodes.

    cut: lines of `hpctrain.comm.watchdog.host_probe.find_cut`. waiting: ranks that wait in the same operation.
    unread: nodes whose file could not be read. stacks: of the absent ranks and of those that wait.
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
    placement: Placement,
    group: str,
    sequence: int,
    now: float,
    usual_silence_s: float,
    waited_s: float,
) -> list[Absence]:
    """Returns the `members` that have not begun operation `sequence` of the communicator `group`, by their files.

    A rank without a file counts as absent, and the ranks of a silent node together; those of an unread node do not.
    The text of a rank whose file is older than `usual_silence_s` at `now` (epoch) includes how long it has been
    silent: at most `waited_s`, the age of the operation, as a rank that took part in the one before was alive then.
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
        "did not come to it" if sequence == 1 else f"came to number {sequence - 1} of it and not to this one"
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
    placement: Placement,
    now: float,
    usual_silence_s: float,
    waited_s: float,
) -> list[Absence]:
    """Returns those of `ranks` that have written nothing for `usual_silence_s`: stopped, or cut off.

    With a backend that serves all groups in one thread, as Horovod does, a stopped rank also blocks groups that
    it is not in.
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
            state = "wrote last before, and no rank of this node has written anything since"
            silent.append(
                Absence(ranks=tuple(found), place=placement.node_names[node], state=state, silent_s=silent_s)
            )
    return sorted(silent, key=lambda absence: absence.ranks[0])


def find_waiting(positions: Positions, *, members: Sequence[int], group: str, sequence: int) -> list[int]:
    """Returns the `members` that wait in operation `sequence` of `group`, by their files."""
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
    """Returns the stacks of the `absent` ranks and of those that wait, equal ones together."""
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
        return f"came to number {sequence - 1} of it and not to this one, and has written nothing since"
    step = "" if position.step is None else f" in step {position.step}"
    step += f" ({position.doing})" if position.doing else ""
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if position.pid is None:
        return "has begun no operation on it and has written nothing"
    if place.sequence == 0:
        return f"has begun no operation on it and waits in no other{step}"
    return f"is past {place.operation} number {place.sequence} of it and waits in no operation{step}"


# Whether a rank that others wait for is hung, by what its node says of it before the run's own limit is
# over. Pure.
#
# Slow is not hung: a rank that computes, or waits for a file, is left alone until the run's own limit. See
# docs/adr/0036.


# A process that has used less of one core than this is idle: the threads of the watchdog use less.
_IDLE_SHARE = 0.05
_IDLE_FOR = 1 / 8  # of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLimits:
    """Seconds after which a late rank may be found hung; None: never.

    here_s: whatever section it is in. everywhere_s: if its section is not known. of: of a section, by its name.
    """

    here_s: float
    everywhere_s: float | None
    of: Callable[[str], float | None]


class IdleSince:
    """When each rank's process was last found to have used a processor, from looks at all of them."""

    def __init__(self) -> None:
        self._last: dict[int, Activity] = {}

    def update(self, positions: Positions) -> None:
        """Adds a look."""
        for rank, position in positions.by_rank.items():
            if position.activity is not None and not self._is_idle(rank, position.activity):
                self._last[rank] = position.activity

    def seconds(self, rank: int, now: Activity) -> float:
        """Returns for how long the process of `rank` has used no processor, as far as is known."""
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
    placement: Placement,
    answers: Mapping[str, bool],
    group: str,
    waited_s: float,
    limits: EarlyLimits,
) -> list[str]:
    """Returns who is hung and why, a text for each; empty if no rank is.

    absences: ranks that have not begun an operation of `group`, at `now`. idle: from earlier looks and this one.
    answers: for each host that was probed, whether it answered. waited_s: age of the operation.
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
    return f"has used no processor for {idle_s:.0f} s, and {what}"


# Ranks in one operation must have passed equal arguments: when that is compared, and which rank differs.
# Pure.


# After this time in one operation the ranks' signatures are compared: have all passed the same buffer?
_COMPARE_AFTER_S = 2.0
COMPARE_AT_MOST_AFTER_S = 4.0
_COMPARISONS = 3  # per operation, since ranks enter it and renew their files at different times


@dataclass(slots=True)
class ComparisonSchedule:
    """Says when the signatures of ranks in one operation are compared. timeout_s: of an operation."""

    timeout_s: float
    _after_s: float = field(init=False)
    _compared: dict[str, tuple[int, int]] = field(default_factory=dict)  # group -> sequence, times

    def __post_init__(self) -> None:
        self._after_s = min(_COMPARE_AFTER_S, self.timeout_s / 4)

    def due(self, positions: Iterable[RankPosition]) -> dict[str, int]:
        """Returns the groups that are to be compared now, with the number of comparisons left afterwards.

        positions: of the ranks of one node.
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
            # That operation was only slow, and so may the next be: compare later, to save file accesses.
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
class Mismatch:
    """Ranks in one operation of `group` with different signatures. ranks: all in it. text: error message."""

    group: str
    sequence: int
    ranks: tuple[int, ...]
    text: str


def find_mismatch(positions: Mapping[int, RankPosition], *, decided: Collection[str] = ()) -> Mismatch | None:
    """Returns the first operation whose ranks have different signatures, None if there is none.

    The most frequent signature counts as correct, in a tie the lowest rank's. A tie counts only if all ranks of the
    group are in the operation, or the group is one of `decided`: else the next rank to come may decide.
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
        usual, num_usual = counts.most_common(1)[0]  # of equally frequent ones the first seen
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
        return Mismatch(group=group, sequence=sequence, ranks=tuple(signatures), text=text)
    return None
