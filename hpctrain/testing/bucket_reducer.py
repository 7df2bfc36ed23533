"""The contract of a bucket reducer: `hpctrain.reduce.BucketReducer`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.comm import World, run_threads
from hpctrain.errors import BufferMismatch
from hpctrain.reduce import BucketReducer, GradientSpec, plan_buckets, result_of, run_to_end
from hpctrain.testing.on_ranks import OnRanks

CPU = torch.device("cpu")
SIZES = (1, 7, 3000, 40_000)


class BucketReducerContract(OnRanks):
    """Implement `make`; set `tolerance` to the relative error of a sum, 0 if nothing is rounded on the wire."""

    tolerance = 0.0

    def make(self, world: World) -> BucketReducer:
        """Returns a new reducer over all ranks of `world`. Collective."""
        raise NotImplementedError

    @pytest.mark.parametrize("bucket_bytes", [1, 20_000, 4_000_000])
    def test_buckets_are_summed_to_the_same_bits_on_every_rank(
        self, num_ranks: int, bucket_bytes: int
    ) -> None:
        """Several steps, planned again half-way: sums, norm, and the numbers that go with them."""
        specs = [GradientSpec(size, torch.float32) for size in SIZES]
        buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)

        def rank_main(world: World) -> list[tuple[list[torch.Tensor], float, list[float]]]:
            reducer, comm = self.make(world), world.duplicate()
            reducer.keep_squares()
            found = []
            for step in range(4):
                if step % 2 == 0:
                    buffers = reducer.plan(buckets, device=CPU)
                factor = reducer.begin_step(0.5)
                assert factor in (0.5, 1.0)
                for number, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                    buffer[: bucket.num_gradients] = _values(world.rank, bucket.num_gradients, step + number)
                    buffer[bucket.first_flag :] = 1.0
                numbers = np.array([1.0, world.rank])
                finishing = reducer.finish(numbers, comm=comm) if step % 2 else None
                run_to_end([reducer.reduce(number) for number in range(len(buckets))])
                reduced = result_of(finishing or reducer.finish(numbers, comm=comm))
                reducer.settle(applied=True, rescale=1.0)
                sums = [
                    buffer[: bucket.num_gradients] / factor
                    for bucket, buffer in zip(buckets, buffers, strict=True)
                ]
                for bucket, buffer in zip(buckets, buffers, strict=True):
                    assert buffer[bucket.first_flag :].ne(0).all()
                norm = float(np.sqrt(reduced.norm_square)) / factor
                found.append((sums, norm, reduced.numbers.tolist()))
            reducer.close()
            return found

        results = run_threads(num_ranks, rank_main)
        for step in range(4):
            sums, norm, numbers = results[0][step]
            assert numbers == [num_ranks, num_ranks * (num_ranks - 1) / 2]
            exact = [
                sum(_values(rank, b.num_gradients, step + n).double() for rank in range(num_ranks))
                for n, b in enumerate(buckets)
            ]
            for values, expected in zip(sums, exact, strict=True):
                assert isinstance(expected, torch.Tensor)
                rounding = 4 * num_ranks * 2.0**-24
                scale = float(expected.abs().max()) + 1.0
                assert float((values.double() - expected).abs().max()) <= (self.tolerance + rounding) * scale
            assert norm == pytest.approx(float(torch.cat([s.double() for s in sums]).norm()), rel=1e-6)
            for other in results[1:]:
                assert all(map(torch.equal, other[step][0], sums))
                assert other[step][1:] == (norm, numbers)

    def test_a_rank_with_another_plan_is_named_on_every_rank(self) -> None:
        def rank_main(world: World) -> str:
            reducer = self.make(world)
            size = 11 if world.rank == 1 else 10
            with pytest.raises(BufferMismatch) as caught:
                reducer.plan(plan_buckets([GradientSpec(size, torch.float32)], bucket_bytes=1), device=CPU)
            assert caught.value.agreed
            return str(caught.value)

        for message in run_threads(3, rank_main):
            assert "rank 1" in message


def _values(rank: int, numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))
