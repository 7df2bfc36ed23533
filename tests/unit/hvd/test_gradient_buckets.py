"""Which gradients are reduced together, and in which order."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.hvd import gradient_reduction
from hpctrain.hvd.gradient_reduction import GradientReduction, Settings
from hpctrain.hvd.group import Group
from hpctrain.hvd.reductions import Compression


def parameters(*elements: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for count in elements]


def plan(tensors: list[torch.Tensor], **settings: object) -> list[list[int]]:
    named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    group = Group(SerialWorld(), name="one rank")
    reduction = GradientReduction(named, group=lambda: group, settings=Settings(**settings))  # type: ignore[arg-type]
    found = [bucket.parameters for bucket in reduction._buckets]
    reduction.close()
    return found


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 400)


def test_buckets_are_in_the_order_of_backward_and_of_limited_size() -> None:
    assert plan(parameters(50, 50, 50, 200, 10)) == [[4], [3], [2, 1], [0]]


def test_on_the_wire_half_as_large_twice_as_many_fit() -> None:
    assert plan(parameters(50, 50, 50, 50), compression=Compression.fp16) == [[3, 2, 1, 0]]


def test_a_bucket_has_one_dtype() -> None:
    mixed = parameters(5, 5) + parameters(5, 5, dtype=torch.float64) + parameters(5)
    assert plan(mixed) == [[3, 2], [4, 1, 0]]


def test_frozen_parameters_are_in_none() -> None:
    tensors = parameters(5, 5, 5)
    tensors[1].requires_grad_(False)
    assert plan(tensors) == [[1, 0]]  # of the two that are left


def test_groups_are_kept_together_however_large() -> None:
    tensors = parameters(200, 200, 5, 5, 5)
    assert plan(tensors, groups=[[tensors[0], tensors[3]], [tensors[1]]]) == [[4, 2], [1], [3, 0]]
    assert plan(tensors, groups=2) == [[4, 3], [2, 1, 0]]
    assert plan(tensors, groups=9) == [[4], [3], [2], [1], [0]]
