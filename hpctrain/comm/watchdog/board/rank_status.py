"""Position of each rank: which operation of which communicator it is in, and which ranks are not in it. All pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.comm.collectives.agreement import describe_ranks
from hpctrain.comm.watchdog.board.processes import Activity
from hpctrain.comm.watchdog.board.short_stacks import StackGroup, fold_stacks, without_stack
from hpctrain.topology import Topology


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

    cut: lines of `hpctrain.comm.watchdog.network_partition.find_cut`. waiting: ranks that wait in the same operation.
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
