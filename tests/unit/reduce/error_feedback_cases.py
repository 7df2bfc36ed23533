"""What every reducer with error feedback must do: inherited by the tests of each."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.comm import World
from hpctrain.errors import BufferMismatch, CheckpointError, UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.testing.on_ranks import OnRanks
from hpctrain.topology import Topology
from tests.unit.reduce.bucket_steps import (
    CPU,
    SHAPES,
    Gradients,
    Steps,
    buckets_of,
    delivered,
    in_gradient_space,
    on_ranks,
    random_gradients,
    same_outputs,
    true_sums,
    whole_state,
)

RANK_COUNTS = [1, 2, 3, 4]
GRADIENTS = random_gradients()


def with_one_changed(*, step: int, rank: int, parameter: int, value: torch.Tensor | None) -> Gradients:
    """GRADIENTS, but for one gradient."""

    def gradients(at_step: int, at_rank: int) -> list[torch.Tensor | None]:
        found = list(GRADIENTS(at_step, at_rank))
        if (at_step, at_rank) == (step, rank):
            found[parameter] = value
        return found

    return gradients


class ErrorFeedbackCases(OnRanks):
    """`make(world, start_step=...)` gives the reducer. held_back: share of the gradients that is at least left after
    nine steps of several ranks."""

    held_back = 0.05

    def make(self, world: World, *, start_step: int = 0, topology: Topology | None = None) -> BucketReducer:
        raise NotImplementedError

    def run(
        self,
        num_ranks: int,
        *,
        gradients: Gradients = GRADIENTS,
        count: int,
        start_step: int = 0,
        buckets: tuple[Bucket, ...] | None = None,
    ) -> list[Steps]:
        planned = buckets_of() if buckets is None else buckets

        def rank(world: World) -> Steps:
            steps = Steps.of(world, lambda w: self.make(w, start_step=start_step), buckets=planned)
            return steps.run(gradients, count=count)

        return on_ranks(num_ranks, rank)

    def exact(self, step: int, num_ranks: int) -> torch.Tensor:
        """The true sums of one step."""
        return in_gradient_space(true_sums(lambda _, r: GRADIENTS(step, r), num_ranks=num_ranks, count=1))

    def test_every_rank_gets_the_same_bits_and_so_does_the_next_run(self, num_ranks: int) -> None:
        ranks, again = self.run(num_ranks, count=4), self.run(num_ranks, count=4)
        assert all(same_outputs(ranks[0], other, last=4) for other in [*ranks[1:], *again])
        assert all(flag > 0 for flags in ranks[0].flags for flag in flags.values())

    def test_what_is_delivered_and_what_is_left_make_up_the_gradients(self, num_ranks: int) -> None:
        gradients = random_gradients(dtype=torch.float64)
        ranks = self.run(num_ranks, gradients=gradients, count=9, buckets=buckets_of(dtype=torch.float64))
        true = in_gradient_space(true_sums(gradients, num_ranks=num_ranks, count=9))
        left = whole_state(ranks)["residual"].sum(dim=0)
        assert left.norm() > self.held_back * true.norm()
        torch.testing.assert_close(delivered(ranks) + left, true, rtol=0, atol=1e-10)

    def test_what_is_left_does_not_grow_so_the_mean_converges(self) -> None:
        shares = []
        for count in (20, 160):
            true = in_gradient_space(true_sums(GRADIENTS, num_ranks=2, count=count))
            ranks = self.run(2, count=count)
            shares.append(float((delivered(ranks) - true).norm() / true.norm()))
        assert shares[1] < shares[0] / 3

    # ------------------------------------------------------------------ state

    def test_restored_on_as_many_ranks_it_goes_on_to_the_same_bits(self, num_ranks: int) -> None:
        straight = self.run(num_ranks, count=8, start_step=5)
        saved = whole_state(self.run(num_ranks, count=6, start_step=5))

        def resume(world: World) -> Steps:
            # Other buckets than those that were saved: the state is by parameter.
            steps = Steps.of(world, lambda w: self.make(w, start_step=5), buckets=buckets_of(bucket_bytes=1))
            shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
            assert steps.reducer.rows_to_load(shapes) == {"residual": [range(world.rank, world.rank + 1)]}
            own = {**saved, "residual": saved["residual"][world.rank : world.rank + 1]}
            steps.reducer.load_state(own, shapes)
            steps.memory, steps.buckets = steps.reducer.plan(buckets_of(), device=CPU), buckets_of()
            return steps.run(GRADIENTS, first=6, count=2)

        resumed = on_ranks(num_ranks, resume)
        assert all(same_outputs(a, b, last=2) for a, b in zip(straight, resumed, strict=True))

    @pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 4)])
    @pytest.mark.parametrize("whole", [True, False])
    def test_on_another_number_of_ranks_each_takes_its_share_of_what_was_left(
        self, before: int, after: int, whole: bool
    ) -> None:
        saved = whole_state(self.run(before, count=5))
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}

        def load(world: World) -> tuple[Steps, int]:
            steps = Steps.of(world, self.make, buckets=buckets_of())
            (rows,) = steps.reducer.rows_to_load(shapes)["residual"]
            if whole:
                steps.reducer.load_state(saved)
            else:
                steps.reducer.load_state(
                    {**saved, "residual": saved["residual"][rows.start : rows.stop]}, shapes
                )
            return steps, len(rows)

        found = on_ranks(after, load)
        assert sum(num_rows for _, num_rows in found) == before
        assert max(num_rows for _, num_rows in found) <= -(-before // after)
        restored = whole_state([steps for steps, _ in found])
        assert restored["residual"].shape == (after, saved["residual"].shape[1])
        torch.testing.assert_close(
            restored["residual"].sum(dim=0), saved["residual"].sum(dim=0), rtol=1e-6, atol=1e-6
        )
        for name in saved.keys() - {"residual"}:
            assert torch.equal(restored[name], saved[name])

    def test_without_saved_state_it_begins_anew(self) -> None:
        def rank(world: World) -> Steps:
            steps = Steps.of(world, self.make, buckets=buckets_of()).run(GRADIENTS, count=2)
            steps.reducer.load_state({"of/another": torch.ones(3)})
            return steps

        assert not whole_state(on_ranks(2, rank))["residual"].any()

    def test_residuals_of_another_model_are_refused(self) -> None:
        def rank(world: World) -> None:
            steps = Steps.of(world, self.make, buckets=buckets_of())
            with pytest.raises(CheckpointError, match=r"\(2, 7\)"):
                steps.reducer.load_state({"residual": torch.zeros(2, 7)})

        on_ranks(2, rank)

    # ------------------------------------------------------------------ corners

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_rank_that_is_not_finite_spoils_the_step_on_all_and_no_later_one(
        self, num_ranks: int, bad: float
    ) -> None:
        value = torch.ones(SHAPES[3])
        value[4, 7] = bad
        spoilt = with_one_changed(step=2, rank=num_ranks - 1, parameter=3, value=value)
        one_bucket = buckets_of(bucket_bytes=10**6)

        def around(world: World) -> Steps:
            """As if the spoilt step had never been."""
            steps = Steps.of(world, self.make, buckets=one_bucket).run(GRADIENTS, count=2)
            return steps.run(GRADIENTS, first=3, count=2)

        ranks = self.run(num_ranks, gradients=spoilt, count=5, buckets=one_bucket)
        assert all(not steps.outputs[2][3].isfinite().all() for steps in ranks)
        expected = on_ranks(num_ranks, around)
        assert all(same_outputs(a, b, last=2) for a, b in zip(ranks, expected, strict=True))

    def test_a_skipped_step_takes_back_what_other_buckets_delivered(self) -> None:
        spoilt = with_one_changed(step=2, rank=1, parameter=0, value=torch.full(SHAPES[0], math.nan))
        before = whole_state(self.run(2, count=2))["residual"]
        after = whole_state(self.run(2, gradients=spoilt, count=3))["residual"]
        assert len(buckets_of()) > 1
        assert torch.equal(before, after)

    def test_what_is_left_follows_the_loss_scale(self) -> None:
        def rank(world: World) -> bool:
            steps = Steps.of(world, self.make, buckets=buckets_of()).run(GRADIENTS, count=2)
            unscaled = steps.state()["residual"].tensor.clone()
            steps.reducer.end_step(applied=False, rescale=0.5)
            return bool(unscaled.any()) and torch.equal(steps.state()["residual"].tensor, unscaled * 0.5)

        assert on_ranks(2, rank) == [True, True]

    def test_zeros_come_out_as_zeros(self, num_ranks: int) -> None:
        ranks = self.run(num_ranks, gradients=lambda step, rank: [torch.zeros(s) for s in SHAPES], count=3)
        assert all(not sums.any() for outputs in ranks[0].outputs for sums in outputs.values())

    @pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25])
    def test_very_small_and_very_large_gradients_are_reduced_as_others(self, size: float) -> None:
        """To the same share of what is held back."""
        shares = []
        for scale in (1.0, size):
            gradients = random_gradients(size=scale)
            true = in_gradient_space(true_sums(gradients, num_ranks=2, count=5)) / scale
            got = delivered(self.run(2, gradients=gradients, count=5)) / scale
            shares.append(float((got - true).norm() / true.norm()))
        assert shares[1] == pytest.approx(shares[0], rel=1e-2)

    def test_ranks_that_plan_otherwise_are_named_on_every_rank(self) -> None:
        def rank(world: World) -> str:
            shapes = SHAPES if world.rank != 2 else ((20, 24), *SHAPES[1:-1], (6,))
            with pytest.raises(BufferMismatch) as caught:
                self.make(world).plan(buckets_of(shapes), device=CPU)
            return str(caught.value)

        messages = on_ranks(3, rank)
        assert len(set(messages)) == 1
        assert "rank 2" in messages[0]


class SparseFeedbackCases(ErrorFeedbackCases):
    """Of reducers that send the first steps as they are, and hold most of the later ones back on one rank too."""

    def test_the_first_steps_are_sent_as_they_are(self, num_ranks: int) -> None:
        ranks = self.run(num_ranks, count=3, start_step=2)
        for step, sums in enumerate(ranks[0].outputs[:2]):
            torch.testing.assert_close(
                in_gradient_space(sums).double(), self.exact(step, num_ranks), rtol=0, atol=1e-5
            )
        third = self.exact(2, num_ranks)
        assert (in_gradient_space(ranks[0].outputs[2]) - third).norm() > 0.1 * third.norm()

    def test_a_new_loss_scale_between_steps_is_no_step(self) -> None:
        def rank(world: World) -> bool:
            steps = Steps.of(world, self.make, buckets=buckets_of()).run(GRADIENTS, count=2)
            before = {name: t.tensor.clone() for name, t in steps.state().items() if name != "residual"}
            steps.reducer.end_step(applied=False, rescale=0.5)
            after = steps.state()
            return bool(before) and all(torch.equal(after[name].tensor, before[name]) for name in before)

        assert on_ranks(2, rank) == [True, True]

    def test_half_precision_buckets_are_refused(self) -> None:
        def rank(world: World) -> None:
            with pytest.raises(UsageError, match="float16"):
                self.make(world).plan(buckets_of(dtype=torch.float16), device=CPU)

        on_ranks(2, rank)

    def test_of_a_parameter_that_no_rank_used_nothing_is_delivered_and_nothing_lost(
        self, num_ranks: int
    ) -> None:
        def gradients(step: int, rank: int) -> list[torch.Tensor | None]:
            found = list(GRADIENTS(step, rank))
            if step == 2:
                found[0] = found[1] = None
            if step == 3 and rank > 0:
                found[0] = None
            return found

        two = whole_state(self.run(num_ranks, gradients=gradients, count=2))["residual"]
        ranks = self.run(num_ranks, gradients=gradients, count=3)
        numel = math.prod(SHAPES[0]) + math.prod(SHAPES[1])
        assert two[:, :numel].any()
        assert torch.equal(whole_state(ranks)["residual"][:, :numel], two[:, :numel])
        assert ranks[0].flags[2][0] == 0
        assert not ranks[0].outputs[2][0].any()
        # The rank that uses it again brings what the others have left too.
        later = self.run(num_ranks, gradients=gradients, count=4)
        assert later[0].flags[3][0] == 1
        true = in_gradient_space(true_sums(gradients, num_ranks=num_ranks, count=4))
        left = whole_state(later)["residual"].double().sum(dim=0)
        torch.testing.assert_close(delivered(later) + left, true, rtol=0, atol=1e-4)

    def test_what_stays_on_the_node_does_not_count_as_sent(self) -> None:
        def bytes_of(world: World, nodes: list[str] | None) -> int:
            topology = Topology.from_node_names(nodes) if nodes else None
            steps = Steps.of(world, lambda w: self.make(w, topology=topology), buckets=buckets_of())
            return steps.run(GRADIENTS, count=2).reducer.bytes_sent()

        each_alone = on_ranks(4, lambda world: bytes_of(world, None))
        assert each_alone[0] > 0
        assert len(set(each_alone)) == 1
        two_by_two = on_ranks(4, lambda world: bytes_of(world, ["a", "a", "b", "b"]))
        assert two_by_two == [0, each_alone[0], 0, each_alone[0]]
        assert on_ranks(2, lambda world: bytes_of(world, ["a", "a"])) == [0, 0]
