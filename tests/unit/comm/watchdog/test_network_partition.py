"""Which host is cut off, judged from who reached whom; and the probes, for which nothing listens."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from hpctrain.comm.watchdog.host_probe import (
    HostReachability,
    ProbeTarget,
    ReservedPort,
    find_cut,
    host_addresses,
    name_hosts,
    probe_hosts,
    targets_of_others,
)

pytestmark = pytest.mark.timing


def all_to_all(hosts: str, *, cut: str = "") -> dict[str, dict[str, bool]]:
    """What each host finds when the hosts `cut` are cut off."""
    return {
        host: {other: host not in cut and other not in cut for other in hosts if other != host}
        for host in hosts
    }


def test_all_reached_says_nothing() -> None:
    assert find_cut(all_to_all("abcd"), here="a") == []
    assert find_cut({}, here="a") == []
    assert find_cut({"a": {}}, here="a") == []


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_one_cut_host_is_named_by_the_others(hosts: str) -> None:
    (line,) = find_cut(all_to_all(hosts, cut="c"), here="a")
    assert line.startswith("c cannot be reached from a (this host), b")
    assert line.endswith("its link is cut, or the node is down")


def test_the_cut_host_names_itself() -> None:
    expected = "c (this host) reaches none of the 3 others asked (a, b, d): its own link is cut"
    findings = all_to_all("abcd", cut="c")
    assert find_cut(findings, here="c") == [expected]
    # Its files may be on the other side of the link too.
    assert find_cut({"c": findings["c"]}, here="c") == [expected]


def test_a_host_without_the_others_findings_names_the_cut_one() -> None:
    (line,) = find_cut({"a": {"b": True, "c": False, "d": True}}, here="a")
    assert line.startswith("c cannot be reached from a (this host), which reaches others")


def test_the_cut_host_is_named_though_it_left_no_findings() -> None:
    findings = all_to_all("abcd", cut="c")
    del findings["c"]
    (line,) = find_cut(findings, here="b")
    assert line.startswith("c cannot be reached from a, b (this host), d")


def test_of_two_hosts_neither_is_blamed() -> None:
    assert find_cut({"a": {"b": False}}, here="a") == [
        "b cannot be reached from a (this host): the link of one of the two is cut"
    ]
    both = find_cut({"a": {"b": False}, "b": {"a": False}}, here="a")
    assert both == ["the hosts form groups that do not reach each other: a | b"]


def test_a_network_in_two_halves_is_told_as_such() -> None:
    findings = {h: {o: (h in "ab") == (o in "ab") for o in "abcd" if o != h} for h in "abcd"}
    assert find_cut(findings, here="d") == ["the hosts form groups that do not reach each other: a, b | c, d"]


def test_two_cut_hosts_are_both_named() -> None:
    lines = find_cut(all_to_all("abcde", cut="bd"), here="a")
    assert [line[0] for line in lines] == ["b", "d"]


def test_a_host_reached_by_some_is_not_called_cut() -> None:
    findings = all_to_all("abc")
    findings["a"]["c"] = False
    assert find_cut(findings, here="b") == ["some hosts do not reach each other directly: a does not reach c"]


def test_many_hosts_are_counted() -> None:
    assert name_hosts(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"


@contextlib.contextmanager
def reserved() -> Iterator[ReservedPort]:
    made = ReservedPort()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def unanswered_port() -> Iterator[int]:
    """A port whose kernel drops new connections, as a cut link does: the queue of its listener is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        time.sleep(0.1)
        yield server.getsockname()[1]


def target(port: int, *, host: str = "b", addresses: tuple[str, ...] = ("127.0.0.1",)) -> ProbeTarget:
    return ProbeTarget(host=host, addresses=addresses, port=port)


def test_a_reserved_port_is_reached_at_all_addresses_and_nothing_listens() -> None:
    with reserved() as made:
        port = made.target.port
        targets = [target(port), target(port, host="c", addresses=(*host_addresses(), "127.0.0.1"))]
        assert probe_hosts(targets, timeout_s=5) == {"b": True, "c": True}
        listening = [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        assert port not in listening
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port))


def test_a_host_whose_rank_has_ended_is_reached() -> None:
    with reserved() as made:
        port = made.target.port
    assert probe_hosts([target(port)], timeout_s=5) == {"b": True}


def test_a_port_where_something_listens_by_now_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert probe_hosts([target(other.getsockname()[1])], timeout_s=5) == {"b": True}


def test_many_hosts_that_do_not_answer_cost_no_more_than_one() -> None:
    with reserved() as made, unanswered_port() as silent:
        targets = [target(silent, host=f"h{n}") for n in range(40)]
        start_s = time.monotonic()
        found = probe_hosts([*targets, target(made.target.port)], timeout_s=0.5)
        assert time.monotonic() - start_s < 5
        assert [host for host, answered in found.items() if answered] == ["b"]


def test_addresses_that_this_host_has_too_are_left_out() -> None:
    with reserved() as made:
        assert probe_hosts([target(made.target.port)], timeout_s=5, own=("127.0.0.1",)) == {}


def test_one_target_a_host_and_none_of_this_host() -> None:
    targets = [target(1, host=f"h{rank // 2}") for rank in range(6)]
    assert [found.host for found in targets_of_others(targets, here="h1")] == ["h0", "h2"]
    assert targets_of_others([target(1, addresses=())], here="h1") == ()


def test_at_most_max_hosts_of_the_other_hosts_are_asked() -> None:
    targets = [target(1, host=f"h{host}") for host in range(300)]
    assert len(targets_of_others(targets, here="h0", max_hosts=64)) == 64


def test_a_host_cut_off_from_a_thousand_others_is_named_in_a_second() -> None:
    """Each of these has asked as many as it may."""
    found = {
        f"h{host}": {f"h{(host + step) % 1250}": (host + step) % 1250 != 17 != host for step in range(1, 65)}
        for host in range(1250)
    }
    start_s = time.thread_time()
    (line,) = find_cut(found, here="h0")
    assert time.thread_time() - start_s < 1
    assert line.startswith("h17 cannot be reached from ")


def test_a_host_that_never_answered_is_not_asked_again() -> None:
    reach = HostReachability()
    with reserved() as made, unanswered_port() as silent:
        reach.others = (target(made.target.port), target(silent, host="c"))
        assert not reach.learn(timeout_s=0.3)
        assert [known.host for known in reach.targets] == ["b"]
        reach.probe(timeout_s=1)
        assert reach.found == {"b": True}
    reach.close()
