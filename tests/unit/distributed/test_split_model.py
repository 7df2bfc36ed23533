"""Repeated blocks of a model, and plans that are refused before anything is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.comm import SerialWorld
from hpctrain.distributed import ParallelPlan, parallelize, repeated_blocks
from hpctrain.distributed.split_model import _place
from hpctrain.errors import UsageError
from hpctrain.topology import Topology


class Residual(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.linear = norm(4), nn.Linear(4, 4)


def split(model: nn.Module, plan: ParallelPlan) -> None:
    topology = Topology.from_node_names(["a"])
    parallelize(model, plan, world=SerialWorld(), topology=topology, device=torch.device("cpu"))


def test_blocks_within_stages_are_found_and_the_stages_are_not() -> None:
    stages = nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(2)))
    model = nn.Sequential(nn.Linear(4, 4), stages)
    assert list(repeated_blocks(model)) == ["1.0.0", "1.0.1", "1.1.0", "1.1.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {}


def test_what_cannot_be_split_is_refused_in_words() -> None:
    tied = nn.Sequential(Residual(), Residual())
    tied[1].linear = tied[0].linear
    with pytest.raises(UsageError, match=r"0\.linear\.weight and 1\.linear\.weight are one parameter"):
        split(tied, ParallelPlan(shard="parameters"))
    normalised = nn.Sequential(Residual(nn.BatchNorm1d), Residual(nn.BatchNorm1d))
    with pytest.raises(UsageError, match=r"running statistics of 0\.norm"):
        split(normalised, ParallelPlan(activation_checkpointing="blocks"))
    with pytest.raises(UsageError, match="the model has none"):
        split(nn.Linear(2, 2), ParallelPlan(activation_checkpointing="blocks"))
    with pytest.raises(UsageError, match="choose none or optimizer or gradients or parameters"):
        ParallelPlan(shard="moments")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="only sharded parameters can be kept within a node"):
        ParallelPlan(shard="gradients", shard_within="node")
    with pytest.raises(UsageError, match="only sharded parameters can be kept within a node"):
        ParallelPlan(tensor=2, tensor_plan={"up": "column", "down": "row"}, shard_within="node")


class Containers(nn.Module):
    """Two lists of layers without children, which have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.blocks = nn.ModuleList(Residual() for _ in range(2))


def test_lists_of_layers_are_no_blocks() -> None:
    assert list(repeated_blocks(Containers())) == ["blocks.0", "blocks.1"]


def test_a_plan_that_is_refused_changes_nothing() -> None:
    model = nn.Sequential(Residual(), Residual())
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UsageError, match="no dimension"):
        split(model, ParallelPlan(shard="parameters", activation_checkpointing="blocks"))
    assert all("forward" not in vars(block) for block in model)


def test_data_parallel_ranks_of_tensor_groups_ascend_as_pytorch_sorts_them() -> None:
    """Where ranks go round two nodes: FSDP2's parts are by the rank in the group, boxes by the place in the mesh."""
    plan = ParallelPlan(tensor=2, tensor_plan={"up": "column"}, shard="parameters")
    found = _place(plan, Topology.from_node_names(list("abababab")))
    assert found is not None
    assert found.ranks == ([0, 2], [1, 3], [4, 6], [5, 7])
