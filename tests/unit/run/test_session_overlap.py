"""Whether a session reduces beside backward: where a network or a device is waited for, or a core is to spare."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.distributed import ShardKind
from hpctrain.reduce import ReductionRequest
from hpctrain.run import Session
from tests.sessions import session_over


@dataclass(frozen=True, kw_only=True)
class Case:
    """nodes: of each rank, also where they are made up. hosts: likewise; None: as the nodes. cores: that it may use."""

    nodes: str
    cores: list[set[int]]
    hosts: str | None = None
    num_threads: int = 1
    device: str = "cpu"


def on_ranks(monkeypatch: pytest.MonkeyPatch, case: Case, ask: Callable[[Session], bool]) -> list[bool]:
    """Returns what a session says on each rank."""
    here = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: (case.hosts or case.nodes)[here.rank])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: case.cores[here.rank])
    monkeypatch.setattr(torch, "get_num_threads", lambda: case.num_threads)

    def on_rank(world: World) -> bool:
        here.rank = world.rank
        session = session_over(world, nodes=case.nodes, device=case.device)
        found = ask(session)
        session.close()
        return found

    return run_threads(len(case.nodes), on_rank, timeout_s=300)


CASES = {
    "two ranks take turns on two cores": (Case(nodes="aa", cores=[{0, 1}] * 2), False),
    "half a core each is none": (Case(nodes="aa", cores=[{0, 1, 2}] * 2), False),
    "two ranks on four cores": (Case(nodes="aa", cores=[{0, 1, 2, 3}] * 2), True),
    "backward takes all four": (Case(nodes="aa", cores=[{0, 1, 2, 3}] * 2, num_threads=2), False),
    "each bound to a core": (Case(nodes="aa", cores=[{0}, {1}]), False),
    "each bound to two": (Case(nodes="aa", cores=[{0, 1}, {2, 3}]), True),
    "one has none to spare": (Case(nodes="aaa", cores=[{0, 1}, {2}, {3, 4}]), False),
    "two nodes with all cores in use": (Case(nodes="ab", cores=[{0}, {0}]), True),
    "nodes made up on one machine": (Case(nodes="ab", hosts="xx", cores=[{0}, {0}]), True),
    "a device": (Case(nodes="aa", cores=[{0}, {0}], device="cuda"), True),
    "one rank on one core": (Case(nodes="a", cores=[{0}]), False),
}


@pytest.mark.parametrize(("case", "expected"), CASES.values(), ids=CASES)
def test_reductions_run_beside_backward_where_that_gains(
    monkeypatch: pytest.MonkeyPatch, case: Case, expected: bool
) -> None:
    found = on_ranks(
        monkeypatch, case, lambda s: s.reductions.overlap(spare_core=s.reductions.has_spare_core())
    )
    assert found == [expected] * len(case.nodes)


CROWDED = {
    "two ranks on two cores": (Case(nodes="aa", cores=[{0, 1}] * 2), False),
    "three ranks on two cores": (Case(nodes="aaa", cores=[{0, 1}] * 3), True),
    "more threads than cores": (Case(nodes="aa", cores=[{0, 1}] * 2, num_threads=2), True),
    "a node is oversubscribed, another is not": (Case(nodes="aab", cores=[{0}, {0}, {0}]), True),
    "two nodes of one rank": (Case(nodes="ab", cores=[{0}, {0}]), False),
    "nodes made up on one machine": (Case(nodes="ab", hosts="xx", cores=[{0}, {0}]), True),
}


@pytest.mark.parametrize("preloaded", [False, True], ids=["", "as the launcher found"])
@pytest.mark.parametrize(("case", "expected"), CROWDED.values(), ids=CROWDED)
def test_ranks_know_whether_they_outnumber_their_cores(
    monkeypatch: pytest.MonkeyPatch, case: Case, expected: bool, preloaded: bool
) -> None:
    monkeypatch.setattr("hpctrain.run.reductions.in_effect", lambda: preloaded)
    found = on_ranks(monkeypatch, case, lambda s: s.reductions.oversubscribed())
    assert found == [expected or preloaded] * len(case.nodes)


CROWDED_NODES = Case(nodes="aab", cores=[{0}, {0}, {0}])
ROOMY_NODES = Case(nodes="ab", cores=[{0}, {0}])


@pytest.mark.parametrize(
    ("case", "gradient_bytes", "shard", "expected"),
    [
        (CROWDED_NODES, 1 << 20, "none", False),
        (CROWDED_NODES, 100 << 20, "none", True),
        (CROWDED_NODES, 1 << 20, "optimizer", True),
        (ROOMY_NODES, 1 << 20, "none", True),
    ],
    ids=["small gradients", "large gradients", "sharded optimizer", "a core for each rank"],
)
def test_small_gradients_are_reduced_after_backward_where_ranks_outnumber_cores(
    monkeypatch: pytest.MonkeyPatch, case: Case, gradient_bytes: int, shard: ShardKind, expected: bool
) -> None:
    def overlaps(session: Session) -> bool:
        plan = ReductionRequest(algorithm="direct")
        return session.reductions.make(plan, gradient_bytes=gradient_bytes, shard=shard).overlap

    assert on_ranks(monkeypatch, case, overlaps) == [expected] * len(case.nodes)
