"""Which node reads which block: the same batches, as much at home as the shares allow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.locality.node_affinity import NodeBlocks, NodeOrder, measure
from hpctrain.data.order.epoch_order import EpochOrder, rank_share
from hpctrain.errors import DataError, RecipeError
from hpctrain.topology import Topology


def topology(*sizes: int) -> Topology:
    return Topology.from_node_names([f"node{k}" for k, size in enumerate(sizes) for _ in range(size)])


def blocks(num_samples: int, *, block_samples: int, nodes: Topology) -> NodeBlocks:
    return NodeBlocks.plan(np.arange(0, num_samples, block_samples), topology=nodes)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_samples=st.integers(1, 200),
    block_samples=st.integers(1, 30),
    global_batch=st.integers(1, 64),
    first=st.integers(0, 20),
)
def test_each_global_batch_is_the_same_set_of_samples(
    sizes: list[int], num_samples: int, block_samples: int, global_batch: int, first: int
) -> None:
    plain = EpochOrder(num_samples=num_samples, seed=3, epoch=1)
    first = min(first, num_samples)
    order = NodeOrder(
        order=plain,
        blocks=blocks(num_samples, block_samples=block_samples, nodes=topology(*sizes)),
        global_batch=global_batch,
        first=first,
    )
    for start in range(first, num_samples, global_batch):
        stop = min(start + global_batch, num_samples)
        whole = order.at(start, stop)
        assert sorted(whole) == sorted(plain.at(start, stop))
        # Any part of it is that part: a rank asks for its share only.
        middle = (start + stop) // 2
        assert np.array_equal(np.concatenate([order.at(start, middle), order.at(middle, stop)]), whole)
    everything = order.at(0, num_samples)
    assert np.array_equal(everything[:first], plain.at(0, first))
    assert sorted(everything) == list(range(num_samples))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    homes=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    samples=st.lists(st.integers(0, 13), min_size=0, max_size=7),
)
def test_no_assignment_with_the_same_shares_has_more_samples_at_home(
    sizes: list[int], homes: list[int], samples: list[int]
) -> None:
    nodes = topology(*sizes)
    found = NodeBlocks(
        starts=np.arange(len(homes)) * 2,
        homes=np.array([home % nodes.num_nodes for home in homes]),
        topology=nodes,
    )
    batch = np.array(samples, dtype=np.int64) % (2 * len(homes))
    places = found.assign(batch)
    assert sorted(places) == list(range(len(batch)))
    node_at = np.repeat(
        nodes.node_of_rank,
        [
            rank_share(0, len(batch), rank=r, num_ranks=nodes.num_ranks).num_samples
            for r in range(nodes.num_ranks)
        ],
    )
    home_of = found.homes[found.blocks_of(batch)]
    at_home = int((home_of[places] == node_at).sum())
    assert at_home == max(
        int((home_of[list(other)] == node_at).sum())
        for other in itertools.islice(itertools.permutations(range(len(batch))), 5040)
    )


def test_blocks_in_order_are_read_by_one_node_each() -> None:
    nodes = topology(2, 2)
    found = blocks(960, block_samples=40, nodes=nodes)
    order = NodeOrder(order=EpochOrder(num_samples=960, shuffle=False), blocks=found, global_batch=160)
    batches = [order.at(k, k + 160) for k in range(0, 960, 160)]
    locality = measure(batches, blocks=found)
    assert (locality.at_home, locality.nodes_per_block) == (1.0, 1.0)
    plain = [np.arange(k, k + 160) for k in range(0, 960, 160)]
    assert measure(plain, blocks=found).at_home == 0.5


def test_a_full_shuffle_is_read_at_home_but_for_what_the_shares_do_not_allow() -> None:
    nodes = topology(4, 4)
    found = blocks(8192, block_samples=64, nodes=nodes)
    plain = EpochOrder(num_samples=8192, seed=1)
    order = NodeOrder(order=plain, blocks=found, global_batch=256)
    shuffled = measure((plain.at(k, k + 256) for k in range(0, 8192, 256)), blocks=found)
    placed = measure((order.at(k, k + 256) for k in range(0, 8192, 256)), blocks=found)
    assert 0.45 < shuffled.at_home < 0.55
    assert placed.at_home > 0.95
    assert placed.nodes_per_block < shuffled.nodes_per_block


def test_homes_follow_the_ranks_of_the_nodes() -> None:
    found = blocks(800, block_samples=1, nodes=topology(3, 1))
    assert np.bincount(found.homes).tolist() == [600, 200]
    assert 1 in found.homes[:4]


def test_blocks_that_make_no_sense_are_refused() -> None:
    nodes = topology(1, 1)
    with pytest.raises(DataError, match="2 blocks with 1 homes"):
        NodeBlocks(starts=np.array([0, 4]), homes=np.array([0]), topology=nodes)
    with pytest.raises(DataError, match="one after the other"):
        NodeBlocks(starts=np.array([0, 4, 4]), homes=np.array([0, 1, 0]), topology=nodes)
    with pytest.raises(DataError, match="outside the 2 nodes"):
        NodeBlocks(starts=np.array([0]), homes=np.array([2]), topology=nodes)
    good = NodeBlocks.plan(np.array([0]), topology=nodes)
    with pytest.raises(RecipeError, match="from position 9 of 5"):
        NodeOrder(order=EpochOrder(num_samples=5), blocks=good, global_batch=2, first=9)
    with pytest.raises(DataError, match="positions 4 to 6"):
        NodeOrder(order=EpochOrder(num_samples=5), blocks=good, global_batch=2).at(4, 6)
