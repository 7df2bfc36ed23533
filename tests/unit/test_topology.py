"""Placement of ranks and the mesh of named axes: pure."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hpctrain.errors import TopologyError
from hpctrain.topology import Mesh, ParallelMesh, Topology

NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


def test_the_axes_of_two_nodes_of_two_ranks() -> None:
    topology = Topology.from_node_names(["a", "a", "b", "b"])
    assert topology.groups("local") == ((0, 1), (2, 3))
    assert topology.groups("node") == ((0, 2), (1, 3))
    local, node = Mesh(topology, 3).axis("local"), Mesh(topology, 3).axis("node")
    assert local is not None
    assert node is not None
    assert (local.ranks, local.index, local.size) == ((2, 3), 1, 2)
    assert (node.ranks, node.index, node.size) == ((1, 3), 1, 2)


def test_beyond_the_smallest_node_a_rank_is_on_no_node_axis() -> None:
    topology = Topology.from_node_names(["a", "a", "a", "b"])
    assert topology.groups("node") == ((0, 3),)
    assert [Mesh(topology, rank).axis("node") is None for rank in range(4)] == [False, True, True, False]


@given(names=NAMES)
def test_every_rank_is_once_on_the_local_axis_where_the_topology_says(names: list[str]) -> None:
    topology = Topology.from_node_names(names)
    for rank, name in enumerate(names):
        axis = Mesh(topology, rank).axis("local")
        assert axis is not None
        assert axis.ranks[axis.index] == rank
        assert axis.index == topology.local_rank_of(rank)
        assert (
            {names[other] for other in axis.ranks} == {name} == {topology.node_names[topology.node_of(rank)]}
        )
    assert sorted(rank for group in topology.groups("local") for rank in group) == list(range(len(names)))


@given(names=NAMES)
def test_a_node_axis_has_one_rank_of_every_node(names: list[str]) -> None:
    topology = Topology.from_node_names(names)
    smallest = min(names.count(name) for name in names)
    groups = topology.groups("node")
    assert len(groups) == smallest
    for group in groups:
        assert [names[rank] for rank in group] == list(topology.node_names)


def test_what_is_no_topology_is_refused() -> None:
    topology = Topology.from_node_names(["a"])
    with pytest.raises(TopologyError, match="no axis 'tensor'; it has local, node"):
        Mesh(topology, 0).axis("tensor")
    with pytest.raises(TopologyError, match="rank 5 is not one of the 1 ranks"):
        topology.node_of(5)
    with pytest.raises(TopologyError, match="not 0 to"):
        Topology(((0, 2),), ("a",))
    with pytest.raises(TopologyError, match="2 node names for 1 nodes"):
        Topology(((0, 1),), ("a", "b"))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "1 node x 1 rank"),
        (["a", "b"], "2 nodes x 1 rank"),
        (["a", "a", "b"], "2 nodes with 2 and 1 ranks"),
    ],
)
def test_a_topology_is_reported_in_words(names: list[str], text: str) -> None:
    assert Topology.from_node_names(names).describe() == text
    assert Topology.from_node_names(names, emulated=True).describe() == f"{text} (emulated)"


class CountedRank(int):
    """A rank that counts how often any of its kind is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedRank.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_looking_a_rank_up_costs_the_same_for_ten_thousand_ranks() -> None:
    num_nodes, ranks_per_node = 1250, 8
    ranks = [CountedRank(rank) for rank in range(num_nodes * ranks_per_node)]
    topology = Topology(
        tuple(tuple(ranks[node::num_nodes]) for node in range(num_nodes)),
        tuple(map(str, range(num_nodes))),
    )
    CountedRank.compared = 0
    nodes = [topology.node_of(rank) for rank in ranks]
    local_ranks = [topology.local_rank_of(rank) for rank in ranks]
    axes = [Mesh(topology, ranks[-1]).axis(name) for name in ("node", "local")]
    assert CountedRank.compared <= 8 * (len(ranks) + 2)  # with the ranks of the same node
    assert nodes == list(topology.node_of_rank) == [rank % num_nodes for rank in range(len(ranks))]
    assert local_ranks == [rank // num_nodes for rank in range(len(ranks))]
    assert [(axis.size, axis.index) for axis in axes if axis] == [(num_nodes, num_nodes - 1), (8, 7)]


def test_ranks_that_are_none_of_the_run_are_refused() -> None:
    topology = Topology.from_node_names(["a", "b"])
    for rank in (-1, 2):
        with pytest.raises(TopologyError, match=f"rank {rank} is not one of the 2 ranks"):
            topology.local_rank_of(rank)


@given(
    nodes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 6),
)
def test_a_mesh_has_every_rank_once_and_tensor_groups_within_a_node(
    nodes: list[int], tensor: int, pipeline: int
) -> None:
    topology = Topology.from_node_names([f"n{node}" for node, size in enumerate(nodes) for _ in range(size)])
    fits = all(size % tensor == 0 for size in nodes) and sum(nodes) // tensor % pipeline == 0
    if not fits:
        with pytest.raises(TopologyError, match=r"tensor = \d does not divide|cannot be split"):
            ParallelMesh.plan(topology, pipeline=pipeline, tensor=tensor)
        return
    mesh = ParallelMesh.plan(topology, pipeline=pipeline, tensor=tensor)
    assert mesh.places() == {
        rank: {
            axis.name: axis.index
            for axis in (mesh.pipeline_axis(rank), mesh.data_axis(rank), mesh.tensor_axis(rank))
        }
        for rank in range(topology.num_ranks)
    }
    assert mesh.shape["pipeline"] == pipeline
    assert mesh.shape["tensor"] == tensor
    groups = [group for stage in mesh.ranks for node in stage for group in node]
    assert sorted(rank for group in groups for rank in group) == list(range(sum(nodes)))
    assert all(len({topology.node_of(rank) for rank in group}) == 1 for group in groups)
    seen = [mesh.data_ranks(stage=stage, tensor=t) for stage in range(pipeline) for t in range(tensor)]
    assert sorted(rank for ranks in seen for rank in ranks) == list(range(sum(nodes)))
    for group in groups:  # the ranks of one read the same samples
        assert len({mesh.data_axis(rank).index for rank in group}) == 1
    for rank in range(sum(nodes)):
        data, within = mesh.data_axis(rank), mesh.tensor_axis(rank)
        assert data.ranks[data.index] == within.ranks[within.index] == rank
        assert (data.size, within.size) == (sum(nodes) // (tensor * pipeline), tensor)
    if mesh.by_node:
        for stage in mesh.ranks:
            for node in stage:
                assert len({topology.node_of(rank) for group in node for rank in group}) == 1


@pytest.mark.parametrize(
    ("sizes", "pipeline", "tensor", "shape"),
    [
        ([4, 4], 1, 1, (1, 2, 4, 1)),
        ([4, 4], 1, 2, (1, 2, 2, 2)),
        ([4, 4], 2, 2, (2, 1, 2, 2)),
        ([4, 4], 4, 1, (4, 1, 2, 1)),
        ([2, 1], 1, 1, (1, 1, 3, 1)),
        ([4, 2], 1, 2, (1, 1, 3, 2)),
    ],
)
def test_the_shape_of_a_mesh(
    sizes: list[int], pipeline: int, tensor: int, shape: tuple[int, int, int, int]
) -> None:
    topology = Topology.from_node_names([f"n{node}" for node, size in enumerate(sizes) for _ in range(size)])
    assert tuple(ParallelMesh.plan(topology, pipeline=pipeline, tensor=tensor).shape.values()) == shape


def test_the_data_axis_is_one_order_for_all_tensor_ranks_however_the_ranks_lie() -> None:
    mesh = ParallelMesh.plan(Topology.from_node_names(["a", "b", "b", "a"]), tensor=2)
    assert [mesh.tensor_axis(rank).ranks for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [mesh.data_axis(rank).ranks for rank in range(4)] == [(0, 1), (0, 1), (3, 2), (3, 2)]
    assert [mesh.data_axis(rank).index for rank in range(4)] == [0, 1, 1, 0]


def test_replicas_by_node_need_equal_nodes() -> None:
    equal = ParallelMesh.plan(Topology.from_node_names(["a", "b", "a", "b"]))
    assert equal.data_grid() == ((0, 2), (1, 3))
    assert equal.data_ranks() == (0, 1, 2, 3)
    with pytest.raises(TopologyError, match="equally many ranks on every node"):
        ParallelMesh.plan(Topology.from_node_names(["a", "a", "b"])).data_grid()
