"""Damaged samples that ranks leave out, agreed before a step."""

from __future__ import annotations

import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import Batch
from hpctrain.train import agreed_batches


def test_a_sample_that_two_ranks_of_a_tensor_group_leave_out_counts_once() -> None:
    def rank(world: World) -> list[tuple[int, float]]:
        # Ranks 0 and 1 read the same three samples, of which one is damaged; 2 and 3 the other three.
        damaged = world.rank < 2
        batch = Batch(
            fields={"x": torch.zeros(2 if damaged else 3)}, epoch=0, start=0, num_samples=2 if damaged else 3,
            global_samples=6, num_skipped=int(damaged),
        )  # fmt: skip
        agreed = agreed_batches([batch], comm=world, counts_samples=world.rank % 2 == 0)
        return [(one.global_skipped, one.weight) for one in agreed]

    assert run_threads(4, rank) == [[(1, 2 / 5)], [(1, 2 / 5)], [(1, 3 / 5)], [(1, 3 / 5)]]
