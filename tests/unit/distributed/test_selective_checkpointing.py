"""Activation checkpointing by blocks and selectively: the same gradients, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm import SerialWorld
from hpctrain.distributed import ParallelPlan, parallelize
from hpctrain.distributed.split_model import keeps
from hpctrain.errors import UsageError
from hpctrain.topology import Topology

WIDTH, TOKENS, BATCH = 16, 8, 4


class Transformer(nn.Module):
    attention_dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.norm(hidden)).view(*hidden.shape[:2], 3, 2, WIDTH // 2)
        query, key, value = (heads[:, :, index].transpose(1, 2) for index in range(3))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.attention_dropout, is_causal=True
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        added: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))
        return hidden + added


class Dropping(Transformer):
    attention_dropout = 0.2


class Convolutional(nn.Module):
    def __init__(self, norm: type[nn.Module] | None = None, *, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(TOKENS, TOKENS, 3, padding=1) for _ in range(2))
        self.norm = norm(TOKENS) if norm is not None else nn.GroupNorm(2, TOKENS)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.norm(self.first(hidden)))
        return hidden + torch.tanh(self.norm(self.second(hidden)))


class KeptBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operations have computed and is still in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[storage._cdata] = (reference, storage.nbytes())
        return result

    def num_bytes(self) -> int:
        return sum(size * (not found.expired()) for found, size in self._made.values())  # type: ignore[no-untyped-call]


def trained(
    block: Callable[[], nn.Module], kind: str, *, autocast: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Returns the output and all gradients of a model of three blocks, and the bytes that its forward keeps."""
    torch.manual_seed(5)
    model = nn.Sequential(*(block() for _ in range(3)))
    model = model.float() if autocast else model.double()
    parallelize(
        model, ParallelPlan(activation_checkpointing=kind), world=SerialWorld(),  # type: ignore[arg-type]
        topology=Topology.from_node_names(["a"]), device=torch.device("cpu"),
    )  # fmt: skip
    dtype = torch.float32 if autocast else torch.float64
    inputs = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    made = KeptBytes()
    with made, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(inputs)
    num_bytes = made.num_bytes()
    output.float().square().mean().backward() if autocast else output.square().mean().backward()
    assert inputs.grad is not None
    return [
        output.detach(),
        inputs.grad,
        *(p.grad for p in model.parameters() if p.grad is not None),
    ], num_bytes


@pytest.mark.parametrize("block", [Transformer, Dropping, Convolutional])
def test_checkpointing_changes_no_bit_and_keeps_less(block: type[nn.Module]) -> None:
    found = {kind: trained(block, kind) for kind in ("none", "blocks", "selective")}
    expected, kept = found["none"]
    for kind in ("blocks", "selective"):
        assert len(found[kind][0]) == len(expected) > 5
        for tensor, wanted in zip(found[kind][0], expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    assert found["blocks"][1] < found["selective"][1] < kept


def test_selective_checkpointing_under_autocast() -> None:
    expected, kept = trained(Transformer, "none", autocast=True)
    found, kept_selectively = trained(Transformer, "selective", autocast=True)
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-2, atol=1e-4)
    assert kept_selectively < kept


def test_attention_that_draws_random_numbers_is_computed_again() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensors = [torch.zeros(1, 1, 1, 8)] * 3
    assert keeps(attention, tensors, {})
    assert keeps(attention, [*tensors, 0.0, True], {})
    assert not keeps(attention, [*tensors, 0.1], {})
    assert not keeps(attention, tensors, {"dropout_p": 0.1})
    assert keeps(torch.ops.aten.mm.default, tensors[:2], {})
    assert not keeps(torch.ops.aten.gelu.default, tensors[:1], {})


def test_what_selective_checkpointing_cannot_compute_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"running statistics of 0\.norm \(BatchNorm1d\)"):
        trained(lambda: Convolutional(nn.BatchNorm1d), "selective")
    with pytest.raises(UsageError, match=r"0\.relu \(ReLU\) overwrites its input.*inplace=False"):
        trained(lambda: Convolutional(inplace=True), "selective")
