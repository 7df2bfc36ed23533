"""Which rank of the mesh pipeline x data x tensor holds what."""

from __future__ import annotations

import pytest

from hpctrain.distributed import ParallelPlan
from hpctrain.distributed.stage_placement import _StageRanks
from hpctrain.errors import TopologyError
from hpctrain.topology import Topology

TENSOR = {"tensor": 2, "tensor_plan": {"*": "column"}}


def place(nodes: str, **plan: object) -> _StageRanks:
    found = ParallelPlan(pipeline=2, micro_batches=2, **plan)  # type: ignore[arg-type]
    return _StageRanks.plan(found, Topology.from_node_names(list(nodes)))


def test_stages_are_on_consecutive_ranks_and_tensor_groups_on_one_node() -> None:
    found = place("aabbccdd", **TENSOR)
    assert found.stages == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.data_axes == ("data",)
    assert found.grid.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_shards_within_a_node_have_an_axis_of_nodes_if_a_stage_is_on_several() -> None:
    found = place("aabbccdd", shard="parameters", shard_within="node")
    assert found.data_axes == ("node", "local")
    assert found.grid[:, :, :, 0].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert place("aabb", shard="parameters", shard_within="node").data_axes == ("data",)


def test_ranks_that_go_round_the_nodes_ascend_in_each_group_of_a_stage() -> None:
    found = place("abababab", shard="parameters", **TENSOR)
    assert found.grid.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert found.pipelines == ((0, 1), (2, 3), (4, 5), (6, 7))
    four = _StageRanks.plan(ParallelPlan(pipeline=4, micro_batches=4), Topology.from_node_names(list("abab")))
    assert four.pipelines == ((0, 2, 1, 3),)


def test_an_irregular_order_is_refused() -> None:
    with pytest.raises(TopologyError, match="numbered node by node"):
        place("abbaabba" + "cddccddc", shard="parameters", shard_within="world", **TENSOR)
