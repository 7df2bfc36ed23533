"""Adasum equals its definition, with ranks as threads: of all ranks, and of nodes; in a training too."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from hpctrain.comm import World, make_two_level, run_threads
from hpctrain.reduce import AdasumReducer, AllReduceUpdater, LossScale, adasum
from hpctrain.reduce.collective_reducers.adasum import adasum_of_nodes
from hpctrain.topology import Topology

SIZES = [[1], [3, 1, 0, 20, 5], [400]]


def part(rank: int, sizes: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(sizes), generator=generator, dtype=torch.float64)


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The rule of the paper (section 3), written down once more."""
    a_b, a_a, b_b = a.flatten() @ b.flatten(), a.flatten() @ a.flatten(), b.flatten() @ b.flatten()
    return a * (1 - a_b / (2 * a_a) if a_a else 1) + b * (1 - a_b / (2 * b_b) if b_b else 1)


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    pairs = [pair(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
    return tree(pairs + parts[2 * len(pairs) :])


def by_tensor(parts: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([tree([each.split(list(sizes))[i] for each in parts]) for i in range(len(sizes))])


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("sizes", SIZES)
def test_of_all_ranks_equals_the_tree_of_pairs(num_ranks: int, sizes: list[int]) -> None:
    """Each tensor by itself, however the ranks' slices cut the buffer; the same bits on every rank."""

    def rank_main(world: World) -> torch.Tensor:
        flat = part(world.rank, sizes)
        adasum(world.duplicate(), flat, sizes=sizes)
        return flat

    expected = by_tensor([part(rank, sizes) for rank in range(num_ranks)], sizes)
    found = run_threads(num_ranks, rank_main)
    for flat in found:
        torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(flat, found[0])


@pytest.mark.parametrize("nodes", ["a", "aab", "abb", "aabb", "aaabbc", "abcde", "aabbccdd"])
@pytest.mark.parametrize("sizes", SIZES)
def test_of_nodes_equals_the_tree_of_the_sums_of_nodes(nodes: str, sizes: list[int]) -> None:
    topology = Topology.from_node_names(list(nodes))

    def rank_main(world: World) -> torch.Tensor:
        flat = part(world.rank, sizes)
        levels = make_two_level(world, topology)
        adasum_of_nodes(world.duplicate(), levels, flat, sizes=sizes, num_nodes=topology.num_nodes)
        return flat

    sums = [sum(part(rank, sizes) for rank in ranks) for ranks in topology.ranks_by_node]
    expected = by_tensor([torch.as_tensor(total) for total in sums], sizes)
    found = run_threads(len(nodes), rank_main)
    for flat in found:
        torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(flat, found[0])


def test_zeros_leave_the_other_tensor_unchanged() -> None:
    def rank_main(world: World) -> list[float]:
        flat = torch.arange(4.0) * world.rank
        adasum(world.duplicate(), flat, sizes=[4])
        return flat.tolist()

    assert run_threads(2, rank_main) == [[0.0, 1.0, 2.0, 3.0]] * 2


torch.manual_seed(7)
FIRST_MODEL = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def make_model() -> torch.nn.Module:
    """The same on every rank: threads share PyTorch's generator."""
    return copy.deepcopy(FIRST_MODEL)


def loss_of(model: torch.nn.Module, *, rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    outputs: torch.Tensor = model(inputs)
    return outputs.square().mean()


@pytest.mark.parametrize("nodes", ["a", "aa", "aab", "aabb", "abcde"])
@pytest.mark.parametrize("between_nodes", [False, True])
def test_a_training_with_accumulation_clipping_and_loss_scale_equals_its_definition(
    nodes: str, between_nodes: bool
) -> None:
    num_ranks, micro_batches, clip_norm = len(nodes), 2, 0.2
    topology = Topology.from_node_names(list(nodes))

    def rank_main(world: World) -> list[torch.Tensor]:
        model = make_model()
        levels = make_two_level(world, topology) if between_nodes else None
        reducer = AdasumReducer(world.duplicate(), topology=topology, levels=levels)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        updater = AllReduceUpdater(
            optimizer, comm=world.duplicate(), reducer=reducer, bucket_bytes=200, clip_norm=clip_norm,
            loss_scale=LossScale(value=128.0), model=model,
        )  # fmt: skip
        for step in range(5):
            for micro in range(micro_batches):
                loss = loss_of(model, rank=world.rank, step=step, micro=micro)
                weight = 1.0 / num_ranks / micro_batches
                updater.backward(loss, weight=weight, last=micro == micro_batches - 1)
            outcome = updater.step(accepts=lambda norm, sums, step=step: step != 3)
            assert outcome.applied == (step != 3)
        updater.close()
        return [parameter.detach() for parameter in model.parameters()]

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parameters = list(model.parameters())
    for step in (0, 1, 2, 4):
        of_rank = []
        for rank in range(num_ranks):
            losses = [loss_of(model, rank=rank, step=step, micro=micro) for micro in range(micro_batches)]
            of_rank.append(torch.autograd.grad(torch.stack(losses).mean(), parameters))
        if between_nodes:
            # The mean over a node, times the node's share of the samples: nodes with more ranks count more.
            combined = [
                [torch.stack([of_rank[r][i] for r in ranks]).sum(0) for ranks in topology.ranks_by_node]
                for i in range(len(parameters))
            ]
            factor = topology.num_nodes / num_ranks
        else:
            combined, factor = [[g[i] for g in of_rank] for i in range(len(parameters))], 1.0
        for parameter, gradients in zip(parameters, combined, strict=True):
            parameter.grad = factor * tree(gradients)
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    found = run_threads(num_ranks, rank_main)
    for of_rank_parameters in found:
        for parameter, expected, first in zip(of_rank_parameters, parameters, found[0], strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-12, atol=1e-12)
            assert torch.equal(parameter, first)


def test_a_gradient_that_is_not_finite_drops_the_step_on_every_rank() -> None:
    def rank_main(world: World) -> tuple[bool, bool]:
        model = make_model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        reducer = AdasumReducer(world.duplicate(), topology=Topology.from_node_names(["a"] * 3))
        updater = AllReduceUpdater(
            torch.optim.SGD(model.parameters(), lr=0.5), comm=world.duplicate(), reducer=reducer, model=model
        )
        loss = loss_of(model, rank=world.rank, step=0, micro=0)
        updater.backward(loss * (float("inf") if world.rank == 1 else 1.0), weight=1 / 3)
        outcome = updater.step()
        updater.close()
        same = all(map(torch.equal, before, (p.detach() for p in model.parameters())))
        return outcome.applied, same

    assert run_threads(3, rank_main) == [(False, True)] * 3
