"""The address at which ranks find rank 0."""

from __future__ import annotations

import socket

import pytest

from hpctrain.comm import host_addresses
from hpctrain.distributed.open_groups import address_of_rank_0
from hpctrain.topology import Topology


def test_one_node_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert address_of_rank_0(Topology.from_node_names(["a", "a"])) == "127.0.0.1"


def test_several_nodes_take_the_name_if_it_resolves() -> None:
    name = address_of_rank_0(Topology.from_node_names(["a", "b"]))
    assert name in (socket.gethostname(), *host_addresses(), "127.0.0.1")
    assert socket.getaddrinfo(name, None)


def test_a_host_whose_name_does_not_resolve_is_found_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert address_of_rank_0(Topology.from_node_names(["a", "b"])) in (*host_addresses(), "127.0.0.1")
