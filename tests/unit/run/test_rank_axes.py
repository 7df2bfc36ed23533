"""Which samples a rank computes, who counts them, and which random numbers it draws."""

from __future__ import annotations

import pytest

from hpctrain.errors import TopologyError, UsageError
from hpctrain.run.compute.ranks import RankAxes
from hpctrain.topology import ParallelMesh, Topology

# Ranks of a node are not consecutive.
MIXED = Topology.from_node_names(["a", "b", "b", "a", "c", "c", "d", "d"])


def axes_of(topology: Topology, **sizes: int) -> list[RankAxes]:
    found = [RankAxes(topology, rank=rank) for rank in range(topology.num_ranks)]
    for axes in found:
        axes.arrange(**sizes)
    return found


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_the_ranks_of_a_pipeline_read_the_same_samples(pipeline: int) -> None:
    axes = axes_of(MIXED, pipeline=pipeline)
    mesh = ParallelMesh.plan(MIXED, pipeline=pipeline)
    assert {a.data.size for a in axes} == {8 // pipeline}
    for rank in range(8):
        together = mesh.pipeline_axis(rank)
        assert together.ranks[together.index] == rank
        assert together.size == pipeline
        assert {axes[other].data.index for other in together.ranks} == {axes[rank].data.index}
        assert [axes[other].counts_samples for other in together.ranks] == [False] * (pipeline - 1) + [True]
    # Each share of the samples is that of one rank of each stage.
    assert sorted(a.data.index for a in axes) == sorted(list(range(8 // pipeline)) * pipeline)


@pytest.mark.parametrize(
    ("sizes", "drawing"), [({"pipeline": 2}, 8), ({"pipeline": 4}, 8), ({"tensor": 2}, 4)]
)
def test_each_stage_draws_its_own_random_numbers_and_a_tensor_group_the_same(
    sizes: dict[str, int], drawing: int
) -> None:
    axes = axes_of(MIXED, **sizes)
    assert {a.drawing.size for a in axes} == {drawing}
    assert {a.drawing.index for a in axes} == set(range(drawing))
    if "tensor" in sizes:
        assert [a.drawing.index for a in axes] == [a.data.index for a in axes]
    else:
        assert all(a.drawing.ranks[a.drawing.index] == rank for rank, a in enumerate(axes))


def test_axes_stay_once_a_loader_was_made_and_must_divide_the_ranks() -> None:
    axes = RankAxes(MIXED, rank=0)
    with pytest.raises(TopologyError, match="start a multiple of 3 ranks"):
        axes.arrange(pipeline=3)
    axes.for_loader()
    axes.arrange()
    with pytest.raises(UsageError, match="pipeline = 2 changes which ranks"):
        axes.arrange(pipeline=2)
