"""A language model that is sharded by FSDP2, and computed again in backward, over a group of one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpctrain import ParallelPlan
from hpctrain.run import Session, init
from tests.gpu.check import Check, largest_difference

STEPS = 8
VOCABULARY = 64
# Of losses near 4: a GPU sums products in another order.
WITHIN = 1e-3
# For the largest model: memory of the GPU, width of a block (of 12.6 million parameters), and the most blocks.
LIMIT_BYTES = 4 << 30
WIDTH = 1024
MOST_BLOCKS = 64
KINDS: Mapping[str, ParallelPlan] = {
    kind: ParallelPlan(activation_checkpointing=kind)  # type: ignore[arg-type]
    for kind in ("none", "blocks", "selective")
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.norms[0](hidden)).view(*hidden.shape[:2], 3, 4, -1)
        query, key, value = (heads[:, :, index].transpose(1, 2) for index in range(3))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return hidden + added


def language_model(*, width: int, depth: int) -> nn.Sequential:
    """Returns a model with equal parameters at every call: tokens, shape (batch, length), to logits."""
    torch.manual_seed(1)
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FSDP2:UserWarning")  # of in-place operations, of which there are none
def test_sharded(check: Check) -> None:
    """FSDP2 over one rank has the losses of the whole model on the CPU, with each kind of checkpointing and with
    parameters, gradients and optimizer state in host memory, which then take less of the GPU's memory."""
    _skip_without_nccl(check)
    plans = {
        f"sharded, {kind}": ParallelPlan(shard="parameters", activation_checkpointing=plan.activation_checkpointing)
        for kind, plan in KINDS.items()
    }  # fmt: skip
    if not check.has_gpu:  # ranks on CPUs refuse offload
        _compare(check, plans, needs=["NCCL's group", "offload"])
        return
    plans["sharded, offload"] = ParallelPlan(shard="parameters", offload=True)
    held = _compare(check, plans)
    assert held["sharded, offload"] < held["sharded, none"], f"MB at most: {held}"


@pytest.mark.thorough
def test_recomputed(check: Check) -> None:
    """Activation checkpointing changes no loss, and on a GPU it takes less memory."""
    held = _compare(check, KINDS)
    if check.has_gpu:
        assert held["blocks"] < held["selective"] < held["none"], f"MB at most: {held}"


def test_largest(check: Check) -> None:
    """How many blocks train within a limit of the GPU's memory: whole, computed again in backward, sharded over one
    rank, and with parameters, gradients and optimizer state in host memory, which must be more than whole ones."""
    if not check.has_gpu:
        pytest.skip("a GPU's memory must be filled")
    _skip_without_nccl(check)
    again: dict[str, Any] = {"shard": "parameters", "activation_checkpointing": "blocks"}
    plans = {
        "whole": KINDS["none"], "blocks": KINDS["blocks"], "sharded, blocks": ParallelPlan(**again),
        "sharded, blocks, offload": ParallelPlan(**again, offload=True),
    }  # fmt: skip
    share = LIMIT_BYTES / torch.cuda.get_device_properties(check.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), check.device)
    try:
        depths = {
            name: largest_that(lambda depth: _fits(check, plan, depth=depth), at_most=MOST_BLOCKS)  # noqa: B023
            for name, plan in plans.items()
        }
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, check.device)
    assert 0 < depths["whole"] <= depths["blocks"], f"blocks that fit: {depths}"
    assert depths["whole"] < depths["sharded, blocks, offload"], f"blocks that fit: {depths}"
    check.found(f"blocks of width {WIDTH}, at most {MOST_BLOCKS}, that train within {LIMIT_BYTES >> 30} GiB")
    for name, depth in depths.items():
        check.figures[f"blocks, {name}"] = float(depth)
        check.figures[f"million parameters, {name}"] = _parameters_of(depth) / 1e6


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 8, 63, 64, 100])
def test_the_largest_number_that_fits_is_found_in_few_trials(limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert largest_that(fits, at_most=64) == min(limit, 64)
    assert max(tried) <= 64
    assert len(tried) <= 13


def _skip_without_nccl(check: Check) -> None:
    if check.has_gpu and not torch.distributed.is_nccl_available():
        pytest.skip(f"this torch ({torch.__version__}) is built without nccl")


def largest_that(fits: Callable[[int], bool], *, at_most: int) -> int:
    """Returns the largest number up to `at_most` that fits, 0 if 1 does not; each smaller one is taken to fit too."""
    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(check: Check, plan: ParallelPlan, *, depth: int) -> bool:
    """Returns False if two steps need more of the GPU's memory than there is."""
    try:
        with init(backend="serial", device=str(check.device)) as session:
            _train(session, plan, width=WIDTH, depth=depth, length=256, steps=2)
    except torch.cuda.OutOfMemoryError:
        fits = False
    else:
        fits = True
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def _parameters_of(depth: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in language_model(width=WIDTH, depth=depth).parameters())


def _compare(
    check: Check, plans: Mapping[str, ParallelPlan], *, needs: Sequence[str] = ()
) -> dict[str, float]:
    """Compares the losses of each plan with those on the CPU. Returns the most MB of a GPU that each takes."""
    with init(backend="serial", device="cpu") as session:
        expected = _losses(session, KINDS["none"])
    assert expected[-1] < 0.9 * expected[0], "nothing was learned, so nothing was compared"
    held: dict[str, float] = {}
    worst = 0.0
    for name, plan in plans.items():
        with init(backend="serial", device=str(check.device)) as session:
            losses = _losses(session, plan)
            if check.has_gpu:
                held[name] = _peak_mb(session, plan)
        worst = max(worst, largest_difference(losses, expected, within=WITHIN, what=name))
    text = f"{STEPS} steps of a language model ({'; '.join(plans)}) have the losses of the CPU"
    check.found(text, needs_gpu=[*needs, "the device's memory"])
    check.figures["largest difference of a loss"] = worst
    check.figures |= {f"MB at most, {name}": most for name, most in held.items()}
    return held


def _losses(session: Session, plan: ParallelPlan) -> list[float]:
    return _train(session, plan, width=32, depth=2, length=16, steps=STEPS)


def _peak_mb(session: Session, plan: ParallelPlan) -> float:
    """Returns the most memory of three steps of a model that is large enough to show activations, MB."""
    torch.cuda.reset_peak_memory_stats(session.device)
    _train(session, plan, width=1024, depth=8, length=512, steps=3)
    return torch.cuda.max_memory_allocated(session.device) / 1e6


def _train(
    session: Session, plan: ParallelPlan, *, width: int, depth: int, length: int, steps: int
) -> list[float]:
    model = session.parallelize(language_model(width=width, depth=depth).to(session.device), plan)
    updater = session.distributed_optimizer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2 / width**0.5)
    )
    losses = []
    for step in range(steps):
        tokens = _tokens(step % 2, length=length).to(session.device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        updater.backward(loss, weight=1.0)
        updater.step()
        losses.append(float(loss.detach()))
    return losses


def _tokens(number: int, *, length: int) -> torch.Tensor:
    """Returns tokens of shape (8, length + 1), each a step from the one before: made on the CPU, the same each time."""
    first = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(number))
    return (first + 3 * torch.arange(length + 1)) % VOCABULARY
