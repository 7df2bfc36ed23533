"""Who has not come to an operation, by the files of ranks and nodes; and how many of them are told in few lines."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpctrain.comm.watchdog.board.rank_status import (
    Absence,
    GroupPosition,
    HangEvidence,
    Positions,
    RankNodes,
    RankPosition,
    find_absent,
    find_silent,
    find_waiting,
    nodes_of_ranks,
)
from hpctrain.comm.watchdog.timeout_report import describe_finding
from hpctrain.topology import Topology
from tests.unit.comm.watchdog.rank_alone import position

pytestmark = pytest.mark.timing

# Ranks 0 and 1 are on h0, 2 and 3 on h1, ...
PAIRS = RankNodes(
    node_of_rank=[rank // 2 for rank in range(10_000)], node_names=[f"h{node}" for node in range(5000)]
)


def test_ranks_of_a_host_are_divided_as_the_topology_says_and_those_in_other_containers_too() -> None:
    hosts = [0, 0, 0, 1, 1]
    assert nodes_of_ranks(hosts, names=["a", "b"]) == RankNodes(node_of_rank=hosts, node_names=["a", "b"])
    emulated = Topology.from_node_names(["a/0", "a/0", "a/1", "a/1", "a/2"], emulated=True)
    found = nodes_of_ranks([0] * 5, names=["a"], topology=emulated)
    assert found == RankNodes(node_of_rank=[0, 0, 1, 1, 2], node_names=["a/0", "a/1", "a/2"])
    assert [found.ranks_on(node) for node in range(found.num_nodes)] == [[0, 1], [2, 3], [4]]
    # Ranks 0 and 1 of node a do not see each other's memory.
    apart = nodes_of_ranks(
        [0, 1, 2], names=["a", "a", "b"], topology=Topology.from_node_names(["a", "a", "b"])
    )
    assert apart == RankNodes(node_of_rank=[0, 1, 2], node_names=["a", "a", "b"])


def absent(positions: Positions, *, sequence: int = 5, waited_s: float = 70.0) -> list[Absence]:
    return find_absent(
        positions, members=range(4), placement=PAIRS, group="world", sequence=sequence, now=101.0,
        usual_silence_s=3.0, waited_s=waited_s,
    )  # fmt: skip


def texts(*positions: RankPosition, silent: dict[int, float | None] | None = None) -> dict[int, str]:
    known = Positions(by_rank={found.rank: found for found in positions}, silent_nodes=silent or {})
    return {absence.ranks[0]: absence.text for absence in absent(known)}


def test_a_rank_that_has_begun_the_operation_is_not_absent() -> None:
    found = texts(
        position(0, sequence=5, written=100.0),
        position(1, sequence=9, waits=False, written=100.0),
        position(2, sequence=4, waits=False, written=100.0),
        position(3, sequence=5, written=100.0),
    )
    assert found == {
        2: "rank 2 on h2 (process 1) has finished all_reduce number 4 of this group and waits in no operation in "
        "step 12"
    }


def test_an_absent_rank_is_found_in_another_communicator_or_silent_or_without_trace() -> None:
    elsewhere = GroupPosition(sequence=2, operation="broadcast", waiting_s=1.0)
    behind = position(1, sequence=4, waits=False, written=100.0)
    found = texts(
        position(0, sequence=5, written=100.0),
        replace(behind, groups={**behind.groups, "other": elsewhere}),
        position(2, sequence=4, waits=False, written=41.0),
    )
    assert set(found) == {1, 2, 3}
    assert "waits in broadcast number 2 of other" in found[1]
    assert found[2].endswith("last heard of 60 s ago")
    # Its node writes, so that the rank itself is known to have written nothing.
    expected = "rank 3 on h1 finished number 4 of this group but did not begin this one, and has written nothing since"
    assert found[3] == f"{expected}, last heard of 70 s ago"


def test_a_rank_whose_file_is_from_the_start_is_said_to_have_come_to_the_operation_before() -> None:
    found = texts(
        *(position(rank, sequence=5, written=100.0) for rank in (0, 2, 3)),
        position(1, sequence=1, written=10.0),
    )
    expected = (
        "rank 1 on h1 (process 1) finished number 4 of this group but did not begin this one, and has written "
        "nothing since"
    )
    assert found == {1: f"{expected}, last heard of 70 s ago"}


def test_the_ranks_of_a_silent_node_are_named_together() -> None:
    here = [position(rank, sequence=5, written=100.0) for rank in (0, 1)]
    before = "ranks 2-3 on h1 finished number 4 of this group but did not begin this one"
    expected = f"{before}, and no rank of this node has written anything since"
    assert texts(*here, silent={1: 40.0}) == {2: f"{expected}, last heard of 40 s ago"}
    assert texts(*here, silent={1: None}) == {2: f"{expected}, last heard of 70 s ago"}
    # In the first operation nothing is known of them from before.
    known = Positions(by_rank={found.rank: found for found in here}, silent_nodes={1: None})
    (first,) = absent(known, sequence=1)
    assert first.text.startswith("ranks 2-3 on h1 did not begin it, and no rank of this node")


def test_of_a_node_whose_file_cannot_be_read_nothing_is_said_but_that() -> None:
    here = {rank: position(rank, sequence=5, written=100.0) for rank in (0, 1)}
    assert absent(Positions(by_rank=here, unread_nodes=[1])) == []
    report = describe_finding(HangEvidence(unread=["h1"]), waits=True, num_asked=0)
    assert report == "the files of h1 cannot be read: what their ranks do is not known"


def test_a_rank_or_node_outside_the_group_that_went_silent_is_found() -> None:
    known = Positions(
        by_rank={2: position(2, written=41.0), 3: position(3, written=100.0)}, silent_nodes={2: 50.0, 3: 5.0}
    )
    found = find_silent(
        known, ranks=range(2, 10), placement=PAIRS, now=101.0, usual_silence_s=10.0, waited_s=70.0
    )
    assert [absence.ranks for absence in found] == [(2,), (4, 5)]
    assert found[0].text == "rank 2 on h2 (process 1) has written nothing since, last heard of 60 s ago"
    assert found[1].text.startswith("ranks 4-5 on h2")
    assert found[1].text.endswith("last heard of 50 s ago")


def test_those_that_wait_in_the_operation_are_told_too() -> None:
    known = Positions(
        by_rank={
            0: position(0, sequence=5),
            1: position(1, sequence=4),
            2: position(2, sequence=5, waits=False),
        }
    )
    assert find_waiting(known, members=range(4), group="world", sequence=5) == [0]


def test_ten_thousand_absences_are_folded() -> None:
    """Also where no ranks are in the same state, and the files are already read: see `test_many_nodes` for these."""
    waits = GroupPosition(sequence=4, operation="all_reduce", waiting_s=3.0)
    by_rank = {
        rank: replace(position(rank, written=80.0 + rank % 10), groups={"world": waits})
        for rank in range(10_000)
    }
    by_rank[17] = position(17, sequence=4, waits=False)
    for rank in range(5000, 5040):  # each in a state of its own
        place = GroupPosition(sequence=rank, operation="broadcast", waiting_s=1.0)
        by_rank[rank] = replace(
            by_rank[rank], groups={"world": replace(waits, waiting_s=None), "other": place}
        )
    silent = dict.fromkeys(range(3000, 3300), 50.0)
    for rank in range(6000, 6600):
        del by_rank[rank]
    start_s = time.perf_counter()
    found = find_absent(
        Positions(by_rank=by_rank, silent_nodes=silent), members=range(10_000), placement=PAIRS, group="world",
        sequence=5, now=100.0, usual_silence_s=5.0, waited_s=70.0,
    )  # fmt: skip
    report = describe_finding(HangEvidence(absent=found), waits=True, num_asked=0)
    assert time.perf_counter() - start_s < 2
    assert sum(len(absence.ranks) for absence in found) == 10_000
    lines = report.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 500
    assert any(line.startswith("  rank 17 on h17") for line in lines)
    assert "ranks in 28 other states" in lines[-1]
    nodes = [line for line in lines if "no rank of this node has written anything" in line]
    assert len(nodes) == 1
    assert "600 ranks, ranks 6000-6599 on h3000, h3001, " in nodes[0]
    assert "and 292 more: each finished number 4" in nodes[0]
    assert any(
        "waits in all_reduce number 4" in line and "last heard of 11 to 20 s ago" in line for line in lines
    )
