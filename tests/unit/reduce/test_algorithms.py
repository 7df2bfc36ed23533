"""What comes of an algorithm that is asked for, on all the capabilities there may be."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.errors import UsageError
from hpctrain.reduce.algorithms import (
    NCCL_ALGORITHMS,
    Algorithm,
    Capabilities,
    candidates,
    choose_algorithm,
    parse_algorithm,
)
from hpctrain.reduce.wire_formats import CODEC_WIRES, SPARSE_WIRES
from hpctrain.topology import Topology

LAYOUTS = (["a"], ["a", "a"], ["a", "b"], ["a", "a", "b"], ["a", "a", "b", "b"])
CAPABILITIES = [
    Capabilities(
        backend="mpi", topology=Topology.from_node_names(names), messages=messages, shared_memory=shared,
        device=device, nccl=nccl,
    )
    for names, messages, shared, device, nccl in itertools.product(
        LAYOUTS, [True, False], [True, False], ["cpu", "cuda"], [None, *NCCL_ALGORITHMS]
    )
]  # fmt: skip
WIRES = (*CODEC_WIRES, *SPARSE_WIRES)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("asked", list(Algorithm))
def test_something_runs_and_what_runs_is_reported(asked: Algorithm, wire: str) -> None:
    for capabilities in CAPABILITIES:
        decision = choose_algorithm(asked, wire=wire, capabilities=capabilities)
        assert (decision.note is None) == (decision.algorithm is asked)
        # What runs instead runs as itself.
        assert choose_algorithm(decision.algorithm, wire=wire, capabilities=capabilities).note is None
        if decision.algorithm is not asked:
            assert decision.note is not None
            assert asked.value in decision.note
            assert decision.algorithm.value in decision.note


@pytest.mark.parametrize("wire", WIRES)
def test_what_auto_chooses_from_runs_as_itself(wire: str) -> None:
    for capabilities in CAPABILITIES:
        found = candidates(wire=wire, capabilities=capabilities)
        assert found
        assert all(
            choose_algorithm(algorithm, wire=wire, capabilities=capabilities).note is None
            for algorithm in found
        )


@pytest.mark.parametrize(("num_nodes", "tried"), [(17, True), (18, False)])
def test_auto_does_not_try_messages_to_every_rank_of_many_nodes(num_nodes: int, tried: bool) -> None:
    topology = Topology.from_node_names([f"n{rank // 4}" for rank in range(4 * num_nodes)])
    capabilities = Capabilities(backend="mpi", topology=topology, messages=True, shared_memory=True)
    found = candidates(wire="fp32", capabilities=capabilities)
    assert (Algorithm.DIRECT in found) is tried
    assert Algorithm.HIERARCHICAL in found


def test_auto_tries_messages_to_every_rank_where_nothing_else_runs() -> None:
    topology = Topology.from_node_names([f"n{rank}" for rank in range(100)])
    capabilities = Capabilities(backend="mpi", topology=topology, messages=True, shared_memory=True)
    assert Algorithm.DIRECT in candidates(wire="fp32", capabilities=capabilities)


def test_without_messages_or_memory_bytes_go_by_the_backends_exchange() -> None:
    topology = Topology.from_node_names(["a", "a", "b", "b"])
    for messages, shared in ((False, True), (True, False)):
        capabilities = Capabilities(
            backend="horovod", topology=topology, messages=messages, shared_memory=shared
        )
        assert (
            choose_algorithm(Algorithm.HIERARCHICAL, wire="fp32", capabilities=capabilities).algorithm
            is Algorithm.HIERARCHICAL_FLAT
        )
        assert (
            choose_algorithm(Algorithm.HIERARCHICAL, wire="int8", capabilities=capabilities).algorithm
            is Algorithm.DIRECT
        )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="hierarchical-ring"):
        parse_algorithm("rings")


@pytest.mark.parametrize("wire", CODEC_WIRES)
def test_a_reducer_that_sums_itself_sends_to_owners_where_a_node_cannot_share_memory(wire: str) -> None:
    topology = Topology.from_node_names(["a", "a", "b", "b"])
    capabilities = Capabilities(backend="mpi", topology=topology, messages=True, shared_memory=False)
    decision = choose_algorithm(
        Algorithm.HIERARCHICAL, wire=wire, capabilities=capabilities, sums_itself=True
    )
    assert decision.algorithm is Algorithm.DIRECT
    assert decision.note == (
        "reduction: hierarchical was asked for, direct is used: the ranks of a node cannot share enough memory"
    )
