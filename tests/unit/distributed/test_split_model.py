"""Repeated blocks of a model, and plans that are refused before anything is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.comm import SerialWorld
from hpctrain.distributed import ParallelPlan, check_plan, name_blocks, parallelize, repeated_blocks
from hpctrain.distributed.split_model import _place
from hpctrain.errors import UsageError
from hpctrain.topology import Topology
from tests.fsdp2 import needs_fsdp2


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


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": Residual(), "second": nn.Sequential(nn.Linear(4, 4))})
        self.head = nn.Linear(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder["first"].linear(self.encoder["first"].norm(values))  # type: ignore[operator]
        logits: torch.Tensor = self.head(self.encoder["second"](hidden))
        return logits


def test_blocks_that_are_named_take_the_place_of_those_that_are_found() -> None:
    model = TwoKinds()
    assert repeated_blocks(model) == {}
    split(model, ParallelPlan(activation_checkpointing="blocks", blocks=["encoder.*", "head"]))
    assert list(repeated_blocks(model)) == ["encoder.first", "encoder.second", "head"]
    assert list(repeated_blocks(model.encoder)) == ["first", "second"]
    assert "functools.partial" in repr(model.head.forward)  # computed again
    repeated = nn.Sequential(Residual(), Residual(), nn.Linear(4, 4))
    name_blocks(repeated, ["2"])
    assert list(repeated_blocks(repeated)) == ["2"]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["decoder.*"], r"`blocks` names 'decoder\.\*', which the model does not have; it has encoder, "),
        (
            ["encoder"],
            r"`blocks` names encoder, which only contains other modules: name those instead, as encoder\.\*",
        ),
        (
            ["encoder.second", "encoder.second.0"],
            "`blocks` names encoder.second.0 and encoder.second, which contains it",
        ),
    ],
)
def test_names_that_are_no_blocks_are_refused(names: list[str], match: str) -> None:
    model = TwoKinds()
    with pytest.raises(UsageError, match=match):
        split(model, ParallelPlan(blocks=names))
    assert repeated_blocks(model) == {}


def test_what_cannot_be_split_is_refused_in_words() -> None:
    normalised = nn.Sequential(Residual(nn.BatchNorm1d), Residual(nn.BatchNorm1d))
    with pytest.raises(UsageError, match=r"running statistics of 0\.norm"):
        split(normalised, ParallelPlan(activation_checkpointing="blocks"))
    with pytest.raises(UsageError, match="repeated blocks, but none were found"):
        split(nn.Linear(2, 2), ParallelPlan(activation_checkpointing="blocks"))
    with pytest.raises(UsageError, match="choose none or optimizer or gradients or parameters"):
        ParallelPlan(shard="moments")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="only sharded parameters can be kept within a node"):
        ParallelPlan(shard="gradients", shard_within="node")
    with pytest.raises(UsageError, match="only sharded parameters can be kept within a node"):
        ParallelPlan(tensor=2, tensor_plan={"up": "column", "down": "row"}, shard_within="node")
    needs_fsdp2()
    tied = nn.Sequential(Residual(), Residual())
    tied[1].linear = tied[0].linear
    with pytest.raises(UsageError, match=r"0\.linear\.weight and 1\.linear\.weight share one tensor"):
        split(tied, ParallelPlan(shard="parameters"))


def test_gradients_that_fsdp_cannot_sum_are_refused_before() -> None:
    needs_fsdp2()

    def refused(model: nn.Module, match: str) -> None:
        with pytest.raises(UsageError, match=match):
            split(model, ParallelPlan(shard="parameters"))

    mixed = nn.Sequential(Residual(), Residual())
    mixed[1].norm.double()
    refused(
        mixed, r"1\.norm\.weight is torch\.float64 and 1\.linear\.weight torch\.float32, both in the block 1"
    )
    outside = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Residual(), Residual()), nn.Linear(4, 4).double())
    refused(outside, r"0\.weight is torch\.float32 and 2\.weight torch\.float64, both outside the blocks")
    empty = nn.Sequential(Residual(), Residual())
    empty[0].prompts = nn.Parameter(torch.empty(0, 4))
    refused(empty, r"0\.prompts has the shape \(0, 4\), without elements")
    # Each block in its own dtype, and what is not trained, can be sharded.
    apart = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Residual(), Residual().double()))
    apart[1][0].prompts = nn.Parameter(torch.empty(0, 4, dtype=torch.float64), requires_grad=False)
    check_plan(apart, ParallelPlan(shard="parameters"))


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
    needs_fsdp2()
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
