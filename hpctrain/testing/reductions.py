"""Tests for a bucket reducer, a codec and an updater."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hpctrain.comm import World, run_threads
from hpctrain.errors import BufferMismatch
from hpctrain.reduce import (
    BucketReducer,
    Codec,
    DistributedOptimizer,
    GradientSpec,
    plan_buckets,
    result_of,
    run_to_end,
)
from hpctrain.testing.on_ranks import OnRanks

# The contract of a bucket reducer: `hpctrain.reduce.BucketReducer`.


CPU = torch.device("cpu")
SIZES = (1, 7, 3000, 40_000)


class BucketReducerContract(OnRanks):
    """Tests a bucket reducer, an implementation of `hpctrain.reduce.BucketReducer`. Implement `make`.

    Attributes:
        tolerance: The allowed relative error of a sum; 0 if values are sent without rounding.
    """

    tolerance = 0.0

    def make(self, world: World) -> BucketReducer:
        """Returns a new reducer over all ranks of `world`. Collective."""
        raise NotImplementedError

    @pytest.mark.parametrize("bucket_bytes", [1, 20_000, 4_000_000])
    def test_buckets_are_summed_to_the_same_bits_on_every_rank(
        self, num_ranks: int, bucket_bytes: int
    ) -> None:
        """Checks sums, norm and additional numbers over several steps, with a new plan of buckets half-way."""
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
                reducer.end_step(applied=True, rescale=1.0)
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


# The contract of a codec: `hpctrain.reduce.Codec`.


# None, one, around a block of 256, around the pieces of 131,072 in which our codecs work.
LENGTHS = (0, 1, 2, 255, 256, 257, 511, 512, 1000, 131_071, 131_072, 131_073, 262_444)

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def some_values(numel: int, *, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Returns normally distributed random values, shape (numel,), with another scale in each block.

    spread: standard deviation of the logarithm of the scales.
    """
    random = torch.Generator().manual_seed(seed)
    factors = torch.exp(spread * torch.randn(-(-numel // 256) or 1, generator=random, dtype=torch.float64))
    values = torch.randn(numel, generator=random, dtype=torch.float64)
    return (values * factors.repeat_interleave(256)[:numel]).clamp(-6e4, 6e4).to(dtype)


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Returns the encoded bytes, 1-d uint8. Raises AssertionError if `encode` writes beyond its output."""
    num_bytes = codec.num_bytes(values.numel(), dtype=values.dtype)
    memory = torch.full((num_bytes + 8,), 0xA5, dtype=torch.uint8)
    codec.encode(values, out=memory[:num_bytes])
    assert (memory[num_bytes:] == 0xA5).all(), "encode wrote beyond its end"
    return memory[:num_bytes]


def decoded(codec: Codec, data: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, math.nan)
    codec.decode(data, out=out)
    return out


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return decoded(codec, encoded(codec, values), like=values)


class CodecContract:
    """Tests a codec, an implementation of `hpctrain.reduce.Codec`.

    Set `codec`. For a lossy codec, implement `error_bound` too.
    """

    codec: ClassVar[Codec]

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the largest allowed absolute error of each value.

        Args:
            values: The values that are encoded.

        Returns:
            float64, of the shape of `values`. Zeros for an exact codec.
        """
        if self.codec.exact:
            return torch.zeros(values.shape, dtype=torch.float64)
        raise NotImplementedError

    @every_dtype
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_errors_stay_within_the_bound(self, dtype: torch.dtype, numel: int) -> None:
        values = some_values(numel, dtype=dtype, seed=numel)
        error = (there_and_back(self.codec, values).double() - values.double()).abs()
        assert (error <= self.error_bound(values)).all()

    @every_dtype
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_add_is_decode_and_add_to_the_bit(self, dtype: torch.dtype, numel: int) -> None:
        values, total = some_values(numel, dtype=dtype), some_values(numel, dtype=dtype, seed=1)
        data = encoded(self.codec, values)
        expected = total + decoded(self.codec, data, like=total)
        self.codec.add(data, out=total)
        assert torch.equal(total, expected)

    @every_dtype
    def test_the_same_values_give_the_same_bytes_wherever_they_lie(self, dtype: torch.dtype) -> None:
        """Encodes the same values at another memory alignment, in another thread, and after other data."""
        values = some_values(131_849, dtype=dtype)
        values[5], values[300] = math.nan, math.inf
        first = encoded(self.codec, values).clone()
        encoded(self.codec, some_values(999, dtype=dtype, seed=3))
        elsewhere = torch.empty(len(values) + 3, dtype=dtype)[3:].copy_(values)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(encoded(self.codec, elsewhere)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], first)
        assert torch.equal(encoded(self.codec, elsewhere), first)

    @every_dtype
    def test_data_that_begin_inside_a_message_are_read_the_same(self, dtype: torch.dtype) -> None:
        """Decodes data at an offset of 8 bytes, the alignment that the interface guarantees."""
        values = some_values(1003, dtype=dtype)
        data = encoded(self.codec, values)
        message = torch.zeros(len(data) + 24, dtype=torch.uint8)
        message[8 : 8 + len(data)] = data
        inside = decoded(self.codec, message[8 : 8 + len(data)], like=values)
        assert torch.equal(inside, decoded(self.codec, data, like=values))

    @every_dtype
    @pytest.mark.parametrize("numel", [1, 256, 300, 131_172])
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_is_not_finite_comes_out_not_finite(
        self, dtype: torch.dtype, numel: int, bad: float
    ) -> None:
        for place in {0, numel // 2, numel - 1}:
            values = some_values(numel, dtype=dtype)
            values[place] = bad
            assert not there_and_back(self.codec, values)[place].isfinite()
            total = torch.zeros_like(values)
            self.codec.add(encoded(self.codec, values), out=total)
            assert not total[place].isfinite()

    @every_dtype
    def test_zeros_stay_zeros(self, dtype: torch.dtype) -> None:
        zeros = torch.zeros(600, dtype=dtype)
        assert torch.equal(there_and_back(self.codec, zeros), zeros)


# The contract of an updater: `hpctrain.reduce.DistributedOptimizer`.


BATCH = 13  # no number of ranks from 2 to 4 divides it


class DistributedOptimizerContract(OnRanks):
    """Tests an updater, an implementation of `hpctrain.reduce.DistributedOptimizer`. Implement `make`.

    The model is small and in float64, so that training on N ranks equals training on one rank to 1e-10.
    """

    def make(
        self, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> DistributedOptimizer:
        """Returns a new updater of `model` and `optimizer` over all ranks of `world`. Collective."""
        raise NotImplementedError

    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_ranks_with_unequal_shares_train_as_one(self, num_ranks: int, micro_batches: int) -> None:
        (alone,) = run_threads(1, lambda world: self._train(world))
        together = run_threads(num_ranks, lambda world: self._train(world, micro_batches=micro_batches))
        for found in together:
            assert all(map(torch.equal, found["parameters"], together[0]["parameters"]))
            assert found["losses"] == together[0]["losses"]
            for one, other in zip(found["parameters"], alone["parameters"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10)
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)

    def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(self) -> None:
        for found in run_threads(3, lambda world: self._train(world, infinite_at=2)):
            assert found["applied"] == [step != 2 for step in range(6)]
            assert math.isnan(found["norms"][2])
            assert all(parameter.isfinite().all() for parameter in found["parameters"])

    def test_a_step_that_is_not_accepted_leaves_everything_as_it_was(self, num_ranks: int) -> None:
        """Also tests a rank whose backward fails half-way. It calls `step` with the gradients computed so far."""
        plain = run_threads(num_ranks, lambda world: self._train(world))
        for fails in (False, True):
            dropped = run_threads(num_ranks, partial(self._train, drop_before=3, fails=fails))
            for one, other in zip(plain, dropped, strict=True):
                assert all(map(torch.equal, one["parameters"], other["parameters"]))
                assert one["losses"] == other["losses"]

    def test_resumed_equals_never_stopped(self, num_ranks: int) -> None:
        whole = run_threads(num_ranks, lambda world: self._train(world))
        resumed = run_threads(num_ranks, lambda world: self._train(world, stop_after=3))
        for one, other in zip(whole, resumed, strict=True):
            assert all(map(torch.equal, one["parameters"], other["parameters"]))

    def test_parameters_are_complete_in_memory_once_they_are_waited_for(self, num_ranks: int) -> None:
        """Reads the memory itself, through views that were created before the step and that PyTorch does not notice."""

        def case(world: World) -> None:
            model, updater, _ = self._begin(world)
            views = [parameter.detach() for parameter in model.parameters()]
            before = [view.clone() for view in views]
            updater.backward(
                model(torch.ones(2, 5, dtype=torch.float64)).square().mean(), weight=1 / num_ranks
            )
            updater.step()
            updater.wait_for_parameters()
            now = [view.clone() for view in views]
            assert not any(map(torch.equal, now, before))
            assert all(map(torch.equal, now, model.parameters()))
            updater.close()

        run_threads(num_ranks, case)

    def _train(
        self,
        world: World,
        *,
        micro_batches: int = 1,
        infinite_at: int = -1,
        stop_after: int = -1,
        drop_before: int = -1,
        fails: bool = False,
    ) -> dict[str, Any]:
        model, updater, optimizer = self._begin(world)
        losses, norms, applied = [], [], []
        for step in range(6):
            if step == stop_after:
                state, tensors = updater.state(), _whole(world, updater)
                saved = model.state_dict(), optimizer.state_dict()
                updater.close()
                model, updater, optimizer = self._begin(world)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                updater.prepare_to_load(state)
                updater.load_state(state, tensors)
            x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            whole, rest = divmod(BATCH, world.num_ranks)
            first = world.rank * whole + min(world.rank, rest)
            mine = x[first : first + whole + (world.rank < rest)]
            if step == drop_before:
                self._drop(model, updater, mine, fails=fails and world.rank == world.num_ranks - 1)
            loss_of_share = 0.0
            parts = [part for part in mine.tensor_split(micro_batches) if len(part)]
            for number, part in enumerate(parts, start=1):
                loss = model(part).square().mean()
                if step == infinite_at and world.rank == world.num_ranks - 1:
                    loss = loss * math.inf
                updater.backward(loss, weight=len(part) / BATCH, last=number == len(parts))
                loss_of_share += loss.item() * len(part) / BATCH
            outcome = updater.step(sums={"loss": loss_of_share})
            losses.append(outcome.sums["loss"])
            norms.append(outcome.grad_norm)
            applied.append(outcome.applied)
        updater.close()
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
        return {"parameters": parameters, "losses": losses, "norms": norms, "applied": applied}

    def _drop(
        self, model: torch.nn.Module, updater: DistributedOptimizer, inputs: torch.Tensor, *, fails: bool
    ) -> None:
        """Takes a step with NaN gradients that is not accepted.

        fails: True if backward raises an error before it reaches the first layer.
        """
        first, *others = model.children()
        hidden = first(inputs)
        if fails:
            hidden.register_hook(_raise)
        loss = torch.nn.Sequential(*others)(hidden).square().sum() * math.nan
        with pytest.raises(MemoryError) if fails else nullcontext():
            updater.backward(loss, weight=1.0)
        seen: list[float] = []

        def accepts(norm: float, sums: Mapping[str, float]) -> bool:
            seen.append(sums["short"])
            return False

        outcome = updater.step(sums={"short": float(fails)}, accepts=accepts)
        assert not outcome.applied
        assert seen == [outcome.sums["short"]]
        assert math.isnan(outcome.grad_norm)

    def _begin(self, world: World) -> tuple[torch.nn.Module, DistributedOptimizer, torch.optim.Optimizer]:
        random = torch.Generator().manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, self.make(world, model, optimizer), optimizer


def _raise(*_: object) -> None:
    raise MemoryError("of the test")


def _whole(world: World, updater: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """Returns copies of the whole tensors that the updater saves.

    All ranks are threads of one process, so they can pass their parts to each other.
    """
    return {held.name: held.tensor.clone() for held in updater.state_tensors()}
