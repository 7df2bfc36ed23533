"""Counting models and their optimizers without memory, and measuring what forward and backward hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.run.memory.forward_backward import (
    LiveBytes,
    counted_messages,
    leave_one_part,
    measure_activations,
    most_bytes,
    split_dimensions,
)
from hpctrain.run.memory.measured_model import META, count_model, optimizer_state
from hpctrain.run.memory.sizes import TensorMessages
from hpctrain.run.recipe.schema import OptimizerSection
from tests.unit.run.memory.measured_task import WIDTH, Block, Splittable, Task, batch_of, runner_of


def test_memory_counts_once_from_when_it_is_made_until_it_is_freed() -> None:
    known = torch.zeros(1000)
    with LiveBytes([known]) as live:
        first = known + 1
        views = [first[:10], first.view(10, 100)]
        known.add_(1)
        assert live.most == 4000
        second = first * 2
        assert live.most == 8000
        del first, views
        third = torch.zeros(500)
        assert live.most == 8000
        fourth = torch.zeros(1000)
        assert live.most == 4000 + 2000 + 4000
        del second, third, fourth
        torch.zeros(10)
    assert live.most == 10_000


def test_what_backward_needs_is_alive_at_its_begin() -> None:
    saved: set[int] = set()
    total = 0
    task = Task()
    runner, batch = runner_of(task), batch_of(256)
    own = {p.untyped_storage().data_ptr() for p in runner.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        place = tensor.untyped_storage().data_ptr()
        if place not in saved | own:
            saved.add(place)
            total += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = runner.loss(batch)
    found = most_bytes(runner, batch)
    assert total <= found <= 1.3 * total
    del loss
    assert all(p.grad is None for p in runner.model.parameters())


def test_checkpointed_blocks_keep_their_inputs_alone_and_selected_ones_products_too() -> None:
    batch = batch_of(256)
    found = measure_activations(
        partial(runner_of, Task(layers=12)), batch, ways=["none", "selective", "blocks"], memory=10**9
    )
    assert set(found["none"]) == set(found["selective"]) == set(found["blocks"]) == {128, 256}
    inputs, inner = 12 * 4 * WIDTH * 256, 4 * 256 * (4 * WIDTH + 2 * WIDTH)
    assert found["none"][256] > 12 * inner
    assert inputs + inner < found["blocks"][256] < inputs + 3 * inner
    # Of a block the outputs of both products, without those of the norm and the activation function.
    assert found["blocks"][256] < found["selective"][256] < found["none"][256]
    assert found["selective"][256] > 12 * 4 * 256 * 5 * WIDTH


def test_larger_micro_batches_are_not_tried_where_memory_is_short() -> None:
    batch, make = batch_of(256), partial(runner_of, Task())
    two = most_bytes(make(), batch_of(2))
    found = measure_activations(make, batch, ways=["none"], memory=3 * two)
    assert max(found["none"]) <= 4
    assert measure_activations(make, batch_of(1), ways=["none"], memory=10**9)["none"].keys() == {1}
    given = measure_activations(make, batch, ways=["none"], memory=0, sizes=[3, 5])
    assert given["none"].keys() == {3, 5}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1), ({"name": "adam"}, 2), ({"name": "adamw"}, 2),
        ({"target": "torch.optim:Adagrad"}, 1), ({"target": "torch.optim:AdamW", "options": {"amsgrad": True}}, 3),
        ({"name": "lars", "momentum": 0.9}, 1), ({"name": "lamb"}, 2),
    ],
)  # fmt: skip
def test_the_state_of_optimizers_is_known_without_memory(section: dict[str, Any], values: int) -> None:
    if section.get("name") in ("lars", "lamb"):
        pytest.importorskip("pytorch_optimizer")
    with META:
        model = nn.Linear(100_000, 1_000)
    notes: list[str] = []
    states = optimizer_state(model, OptimizerSection.model_validate(section), note=notes.append)
    assert notes == []
    for parameter, state in states.items():
        assert state.like_parameter == values * parameter.nbytes
        assert state.other <= 16


class Secretive(torch.optim.SGD):
    """Its step fails unless the parameters are those of a real model."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("not like this")


def test_an_optimizer_that_cannot_be_tried_counts_two_values() -> None:
    with META:
        model = nn.Linear(10, 10)
    notes: list[str] = []
    section = OptimizerSection.model_validate({"target": f"{__name__}:Secretive"})
    states = optimizer_state(model, section, note=notes.append)
    assert sum(state.like_parameter for state in states.values()) == 2 * 440
    assert "not like this" in notes[0]


def test_a_model_is_counted_by_blocks() -> None:
    with META:
        model = Task(layers=3).build_model()
    model[0].norm.weight.requires_grad_(False)
    model.register_buffer("mask", torch.zeros(7))
    sizes = count_model(model, OptimizerSection(), note=pytest.fail)
    assert sizes.num_elements == sum(p.numel() for p in model.parameters())
    assert sizes.buffer_bytes == 28
    block = 4 * sum(p.numel() for p in Block().parameters())
    assert sizes.blocks() == {
        "0": (block, block - 4 * WIDTH), "1": (block, block), "2": (block, block),
        "": (4 * (2 * WIDTH + 2), 4 * (2 * WIDTH + 2)),
    }  # fmt: skip
    assert [p.state_bytes for p in sizes.parameters][:2] == [0, 8 * WIDTH]


class Gathered(Splittable):
    """Splits an embedding, and a layer whose outputs every rank receives."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 12))

    def tensor_plan(self) -> dict[str, str]:
        return {"0": "row", "2": "column-gathered"}


def test_what_is_gathered_has_its_whole_shape_on_a_part() -> None:
    model = Gathered().build_model()
    assert split_dimensions(model, Gathered().tensor_plan()) == {"0.weight": 0, "2.weight": 0, "2.bias": 0}
    indices = torch.tensor([[0, 39], [20, 1]])
    with counted_messages(model, Gathered().tensor_plan(), samples=2) as sums:
        model(indices)
    # The embedding is summed; of the layer the outputs are gathered, and the gradient of its input is summed.
    assert sums() == TensorMessages(forward=2 * 4 * WIDTH + 4 * 12 / 2, in_blocks=0, backward=2 * 4 * WIDTH)
    leave_one_part(model, Gathered().tensor_plan(), tensor=4)
    assert [tuple(p.shape) for p in model.parameters()] == [(10, WIDTH), (3, 2 * WIDTH), (3,)]
    assert model(indices).shape == (2, 12)
