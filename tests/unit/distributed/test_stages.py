"""Layers as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpctrain.distributed import ParallelPlan
from hpctrain.distributed.pipeline import check_held_by_layers, divide_into_stages, release_others
from hpctrain.errors import UsageError


def make_model(blocks: int = 4) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(8, 4), *layers, nn.LayerNorm(4), nn.Linear(4, 8))


def test_blocks_are_divided_evenly_and_other_layers_are_at_the_ends() -> None:
    model = make_model(4)
    stages = divide_into_stages(model, list(model), num_stages=2)
    assert [[list(model).index(layer) for layer in stage] for stage in stages.layers] == [
        [0, 1, 2],
        [3, 4, 5, 6],
    ]
    assert divide_into_stages(model, list(model), num_stages=4).num_stages == 4
    assert stages.first_stage["0.weight"] == 0
    assert stages.first_stage["6.bias"] == 1


def test_a_rank_keeps_its_stages_under_the_names_of_the_whole_model() -> None:
    model, whole = make_model(4), make_model(4)
    release_others(model, divide_into_stages(model, list(model), num_stages=4), own=[1, 3])
    names = [name for name, _ in whole.named_parameters() if name.split(".")[0] in ("2", "4", "5", "6")]
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    model.load_state_dict({name: tensor for name, tensor in whole.state_dict().items() if name in names})
    torch.testing.assert_close(model[2](torch.ones(1, 4)), whole[2](torch.ones(1, 4)))


def test_a_parameter_that_a_module_outside_of_the_layers_holds_cannot_be_replaced() -> None:
    model = make_model(4)
    check_held_by_layers(model, list(model))
    model.register_parameter("scale", model[6].bias)
    with pytest.raises(UsageError, match="the parameter scale is held by Sequential, which is in no layer"):
        check_held_by_layers(model, list(model))


def tie(model: nn.Sequential) -> list[nn.Module]:
    model[6].weight = model[0].weight
    return list(model)


@pytest.mark.parametrize(
    ("layers", "num_stages", "says"),
    [
        (list, 3, r"4 blocks \(Sequential\) cannot be split into 3 stages"),
        (lambda model: list(model)[:-1], 2, "the parameter 6.weight is in no layer"),
        (tie, 2, "the parameter 0.weight is used in stages 0 and 1"),
        (lambda model: [*model, nn.BatchNorm1d(8)], 2, "layer 7 of pipeline_layers has batch normalisation"),
        (lambda _: [], 2, "pipeline_layers returned no list of modules"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    layers: Callable[[nn.Sequential], list[nn.Module]], num_stages: int, says: str
) -> None:
    model = make_model(4)
    with pytest.raises(UsageError, match=says):
        divide_into_stages(model, layers(model), num_stages=num_stages)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pipeline": 4, "micro_batches": 2}, "'1f1b' needs at least 4 micro-batches"),
        ({"pipeline": 4, "micro_batches": 6, "schedule": "zero-bubble"}, "needs a multiple of 4"),
        (
            {"pipeline": 2, "micro_batches": 2, "shard": "gradients"},
            "would save no memory over 'optimizer'",
        ),
        (
            {
                "pipeline": 2,
                "micro_batches": 2,
                "tensor": 2,
                "tensor_plan": {"up": "column"},
                "sequence": True,
            },
            "cannot be combined with sequence = true",
        ),
        (
            {"pipeline": 2, "micro_batches": 2, "shard": "parameters", "offload": True},
            "cannot be combined with offload = true",
        ),
        ({"pipeline": 2, "schedule": "2f2b"}, "schedule is '2f2b'"),
        ({"pipeline": 0}, "pipeline is 0"),
    ],
)
def test_plans_of_pipelines_that_do_not_fit_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ParallelPlan(**given)  # type: ignore[arg-type]


def test_two_stages_are_on_each_rank_of_some_schedules() -> None:
    assert ParallelPlan(pipeline=2, micro_batches=2).stages_per_rank == 1
    assert ParallelPlan(pipeline=2, micro_batches=2, schedule="interleaved").stages_per_rank == 2
