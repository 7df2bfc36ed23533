"""Tensor plans that are refused before anything is split, in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.comm import SerialWorld
from hpctrain.data import pack_arrays
from hpctrain.distributed import ParallelPlan, TensorPlan, parallelize
from hpctrain.errors import RecipeError, TopologyError, UsageError
from hpctrain.run import parse_recipe
from hpctrain.tasks.characters import Characters
from hpctrain.tasks.digits import Digits
from hpctrain.topology import Topology
from hpctrain.train import Task, TensorParallelTask
from tests.sessions import carried_out, session_over


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.padded = nn.Embedding(6, 4, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight


def split(
    plan: TensorPlan, *, tensor: int = 2, nodes: tuple[str, ...] = ("a",), sequence: bool = False,
    model: nn.Module | None = None,
) -> None:  # fmt: skip
    parallelize(
        model or Model(), ParallelPlan(tensor=tensor, tensor_plan=plan, sequence=sequence), world=SerialWorld(),
        topology=Topology.from_node_names(nodes), device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "tensor", "message"),
    [
        (
            {"blocks.*.up": "column"},
            2,
            "names 'blocks.*.up', which the model does not have; it has tokens, padded",
        ),
        (
            {"blocks.*.0": "colwise"},
            2,
            "splits blocks.*.0 by 'colwise': choose one of column, column-gathered, row, sequence,",
        ),
        ({"norm": "row"}, 2, "splits norm, LayerNorm, by 'row': it can split an nn.Linear by"),
        ({"tokens": "column"}, 2, "splits tokens, Embedding, by 'column'"),
        ({"padded": "row"}, 2, "padded has padding_idx or max_norm"),
        ({"blocks.*.0": "column"}, 4, "tensor = 4 does not divide out_features = 6 of blocks.0.0"),
        (
            {"blocks.*.0": ("column", 3)},
            2,
            "does not divide the 3 parts (heads) of out_features of blocks.0.0",
        ),
        (
            {"blocks.*.0": ("column", 4)},
            2,
            "out_features = 6 of blocks.0.0 cannot be divided into 4 equal parts",
        ),
        (
            {"blocks.*.1": "row", "blocks.1.*": "row"},
            2,
            "names blocks.1.1 twice, by 'blocks.*.1' and 'blocks.1.*'",
        ),
        ({"head": "column-gathered"}, 2, "head.weight and tokens.weight share one tensor"),
        ({"tokens": "row"}, 2, "tokens.weight and head.weight share one tensor"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(plan: TensorPlan, tensor: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        split(plan, tensor=tensor)


class Norms(nn.Module):
    """Layers that can be computed on parts of the sequence, but for those that a test adds."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6)
        for name, module in more.items():
            self.add_module(name, module)


ON_PARTS = {"tokens": "sequence", "norm": "sequence", "head": "sequence-gathered"}


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (Norms(), {"tokens": "sequence"}, "tensor_plan does not name norm, head. It must name each module"),
        (Norms(drops=nn.Dropout(0.1)), ON_PARTS, "tensor_plan does not name drops"),
        (
            Norms(),
            ON_PARTS | {"tokens": ("sequence", 5)},
            "does not divide the sequence of 5 positions of tokens",
        ),
        (
            Norms(bn=nn.BatchNorm1d(4)),
            ON_PARTS | {"bn": "sequence"},
            "its statistics are over whole sequences",
        ),
        (Norms(drops=nn.Dropout1d()), ON_PARTS | {"drops": "sequence"}, "use nn.Dropout, which drops each"),
        (Norms(two=nn.Sequential(nn.ReLU())), ON_PARTS | {"two": "sequence"}, "name the modules within it"),
        (
            nn.Sequential(nn.Linear(2, 2)),
            {"0": "sequence-gathered"},
            "split where an nn.Embedding takes indices",
        ),
    ],
)
def test_a_plan_that_does_not_fit_parts_of_the_sequence_is_refused(
    model: nn.Module, plan: TensorPlan, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        split(plan, sequence=True, model=model)


def test_ranks_of_a_node_that_the_group_does_not_divide_are_refused() -> None:
    with pytest.raises(
        TopologyError, match="tensor = 2 does not divide the 3 ranks on a: a tensor group lies on one"
    ):
        split({"blocks.*.0": "column", "blocks.*.1": "row"}, nodes=("a", "a", "a", "b"))


def test_a_plan_is_complete() -> None:
    with pytest.raises(UsageError, match="needs a tensor_plan, which says how modules are split"):
        ParallelPlan(tensor=2)
    with pytest.raises(UsageError, match="tensor is 0"):
        ParallelPlan(tensor=0)
    with pytest.raises(UsageError, match="set tensor to 2 or more"):
        ParallelPlan(sequence=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"ranks": 3}}, "parallel.tensor = 2 does not divide run.ranks = 3"),
        ({"reduction": {"wire": "fp16"}}, "reduction.wire: with parallel.tensor = 2"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name = 'lamb' needs the norm of whole layers"),
        ({"parallel": {"sequence": True}}, "sequence = true splits sequences over the ranks"),
        ({"run": {"ranks": 20}}, "data.global_batch = 8 cannot be split over run.ranks = 20"),
    ],
)
def test_a_recipe_that_does_not_fit_split_layers_is_refused(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(recipe("nowhere", **sections))


def recipe(where: str, **sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": {"target": "tests:Digits"}, "data": {"train": f"{where}/data", "global_batch": 8},
        "parallel": {"tensor": 2}, **sections,
        "run": {"directory": f"{where}/run", "steps": 1, **sections.get("run", {})},
    }  # fmt: skip


class NoPlan(Digits):
    def tensor_plan(self) -> dict[str, str]:
        return {}


class FaultyPlan(Digits):
    def tensor_plan(self) -> dict[str, str]:
        raise KeyError("heads")


class OtherBlocks(Digits):
    def parallel_blocks(self) -> list[str]:
        return ["layers.*"]


class FaultyBlocks(Digits):
    def parallel_blocks(self) -> list[str]:
        raise KeyError("layers")


@pytest.mark.parametrize(
    ("task", "parallel", "message"),
    [
        (Digits, {}, r"tests:Digits does not say how its model is split. Give it a method tensor_plan\(self\)"),
        (NoPlan, {}, "tests:Digits.tensor_plan names no modules"),
        (FaultyPlan, {}, "tests:Digits.tensor_plan raised KeyError: 'heads'"),
        (
            OtherBlocks, {"parallel": {"shard": "parameters"}},
            r"tests:Digits\.parallel_blocks: `blocks` names 'layers\.\*', which the model does not have",
        ),
        (
            FaultyBlocks, {"parallel": {"shard": "parameters"}},
            r"tests:Digits\.parallel_blocks raised KeyError: 'layers'",
        ),
    ],
)  # fmt: skip
def test_a_task_whose_model_cannot_be_split_is_told_what_is_wrong(
    tmp_path: Path, task: type[Task], parallel: dict[str, Any], message: str
) -> None:
    pack_arrays(tmp_path / "data", {"image": np.zeros((8, 8, 8), np.float32), "label": np.zeros(8, np.int64)})
    assert isinstance(Characters(), TensorParallelTask)
    assert not isinstance(Digits(), TensorParallelTask)
    with pytest.raises(RecipeError, match=message):
        carried_out(recipe(str(tmp_path), **parallel), task())


def test_a_loader_that_was_made_before_the_model_was_split_is_noticed(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "data", {"x": np.zeros((8, 3), np.float32)})
    session = session_over(SerialWorld())
    session.loader(session.open_dataset(tmp_path / "data"), global_batch=4)
    with pytest.raises(UsageError, match=r"call session\.parallelize before session\.loader"):
        session.parallelize(Model(), ParallelPlan(tensor=2, tensor_plan={"blocks.*.0": "column"}))
