"""On one node a gradient that no other rank reads is copied into its bucket while it is summed, not before."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.threads import ThreadsWorld, run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.algorithm import Algorithm
from hpctrain.reduce.spans import Span
from hpctrain.topology import Topology
from tests.unit.test_engine import engine


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.nn.Flatten(), torch.nn.Linear(5 * 36, 40), torch.nn.ReLU(), torch.nn.Linear(40, 7),
    )  # fmt: skip


def gradients(found: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in found.parameters() if p.grad is not None]


def backward(found: torch.nn.Module, *, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return found(torch.rand(4, 3, 8, 8, generator=generator)).square().sum()


class KeepGradients(torch.optim.SGD):
    """Keeps what it was given."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        self.seen = [p.grad.detach().clone() for p in parameters]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 8_000])
def test_sums_are_those_of_all_ranks_whoever_reads_what(num_ranks: int, bucket_bytes: int) -> None:
    topology = Topology.from_node_names(["a"] * num_ranks)
    alone = [model() for _ in range(num_ranks)]
    models = [model() for _ in range(num_ranks)]  # here: all threads share one random generator
    for rank, one in enumerate(alone):
        backward(one, rank=rank).backward()
    expected = [torch.stack(of).sum(0) / num_ranks for of in zip(*map(gradients, alone), strict=True)]

    def on_rank(world: ThreadsWorld) -> tuple[list[torch.Tensor], int, int]:
        mine = models[world.rank]
        optimizer = KeepGradients(mine.parameters(), lr=0.0)
        reducer = engine(world, topology, algorithm=Algorithm.HIERARCHICAL, chunk_elems=1 << 19)
        updater = AllReduceUpdater(
            optimizer, comm=world.duplicate(), reducer=reducer, bucket_bytes=bucket_bytes, overlap=False
        )
        late = sum(reducer.late_part(number).numel for number in range(len(updater.buckets)))
        for _ in range(3):
            updater.backward(backward(mine, rank=world.rank), weight=1 / num_ranks)
            kept = len(updater._memory._kept)
            assert updater.step().applied
            assert not updater._memory._kept
        updater.close()
        return optimizer.seen, late, kept

    found = run_threads(num_ranks, on_rank, timeout_s=60)
    total = sum(bucket for _, bucket, _ in found)
    assert total >= sum(p.numel() for p in model().parameters())  # each element is one rank's
    assert sum(kept for _, _, kept in found) > 0  # or nothing was tested
    for seen, _, _ in found:
        for sums, right in zip(seen, expected, strict=True):
            torch.testing.assert_close(sums, right, rtol=1e-5, atol=1e-6)
    for seen, _, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen, found[0][0], strict=True))


def test_a_gradient_changed_before_the_step_is_refused_where_it_is_filled_late_too() -> None:
    topology = Topology.from_node_names(["a", "a"])

    def on_rank(world: ThreadsWorld) -> bool:
        mine = model()
        reducer = engine(world, topology, algorithm=Algorithm.HIERARCHICAL, chunk_elems=1 << 19)
        updater = AllReduceUpdater(
            torch.optim.SGD(mine.parameters(), lr=0.1), comm=world.duplicate(), reducer=reducer, overlap=False
        )
        updater.backward(backward(mine, rank=world.rank), weight=0.5)
        late = next(iter(updater._memory._kept))
        changed = list(mine.parameters())[late].grad
        assert changed is not None
        changed.mul_(0.5)
        with pytest.raises(UsageError, match="changed between backward and step"):
            updater.step()
        return True

    assert run_threads(2, on_rank, timeout_s=60) == [True, True]


def test_between_nodes_and_alone_nothing_is_late() -> None:
    topology = Topology.from_node_names(["a", "b"])

    def on_rank(world: ThreadsWorld) -> Span:
        reducer = engine(world, topology, algorithm=Algorithm.HIERARCHICAL)
        AllReduceUpdater(
            torch.optim.SGD(model().parameters(), lr=0.1),
            comm=world.duplicate(),
            reducer=reducer,
            overlap=False,
        )
        return reducer.late_part(0)

    assert run_threads(2, on_rank, timeout_s=60) == [Span(0, 0)] * 2
