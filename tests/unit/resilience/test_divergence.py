"""Skip, roll back, give up: decided from losses alone."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import example, given, strategies as st

from hpctrain.errors import DivergedError, ExitCode
from hpctrain.resilience.divergence import Divergence, DivergenceLimits, cannot_jump, robust_z

NAN = float("nan")


def guard(**limits: float) -> Divergence:
    return Divergence(DivergenceLimits(**{"jump_z": 20.0, "window": 20, "max_skipped_in_row": 3, **limits}))  # type: ignore[arg-type]


def take(divergence: Divergence, step: int, loss: float, *, grad_norm: float = 1.0) -> bool:
    """One step as the loop makes it. Returns whether it was applied."""
    why_not = divergence.why_not(loss=loss, grad_norm=grad_norm)
    applied = why_not is None and math.isfinite(grad_norm)
    divergence.after_step(step, loss=loss, applied=applied, why_not=why_not)
    return applied


def trained(divergence: Divergence, num_steps: int = 50, *, loss: float = 3.0, spread: float = 0.02) -> int:
    """A healthy run. Returns the number of steps."""
    draw = random.Random(1)
    for step in range(1, num_steps + 1):
        assert take(divergence, step, loss * math.exp(draw.gauss(0, spread)))
    return num_steps


def test_the_score_is_that_of_a_normal_distribution() -> None:
    draw = random.Random(2)
    losses = [draw.gauss(-5.0, 0.5) for _ in range(2000)]  # negative ones, as of a log likelihood
    assert robust_z(-5.0 + 4 * 0.5, losses) == pytest.approx(4.0, rel=0.05)
    positive = [math.exp(draw.gauss(-5.0, 2.0)) for _ in range(2000)]  # near zero, over powers of ten
    assert robust_z(math.exp(-5.0 + 4 * 2.0), positive) == pytest.approx(4.0, rel=0.05)


def test_one_wild_loss_among_the_recent_ones_hides_no_jump() -> None:
    losses = [3.0 + 0.01 * number for number in range(20)]
    assert robust_z(30.0, [*losses, 1e30]) > 20


@given(
    recent=st.lists(st.floats(1e-300, 1e300), min_size=10, max_size=30),
    loss=st.floats(1e-300, 1e300),
    limit=st.floats(0.1, 50.0),
)
@example(recent=[1e300] * 10, loss=1.7e308, limit=0.1)
def test_what_is_ruled_out_quickly_is_no_jump(recent: list[float], loss: float, limit: float) -> None:
    if cannot_jump(loss, sorted(recent), limit=limit):
        assert robust_z(loss, recent) < limit


@given(spread=st.floats(0.05, 2.0), seed=st.integers(0, 2**32 - 1))
def test_most_usual_losses_are_ruled_out_quickly(spread: float, seed: int) -> None:
    rng = random.Random(seed)
    recent = sorted(math.exp(rng.gauss(0.0, spread)) for _ in range(100))
    usual = [math.exp(rng.gauss(0.0, spread)) for _ in range(100)]
    assert sum(cannot_jump(loss, recent, limit=20.0) for loss in usual) == 100


def test_losses_that_do_not_vary_make_no_jump_of_a_small_change() -> None:
    assert robust_z(1.1, [1.0] * 20) < 5
    assert robust_z(-0.9, [-1.0] * 20) < 6
    assert math.isfinite(robust_z(1e-300, [0.0] * 20))


@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0])
def test_a_healthy_run_is_left_alone_whatever_its_losses_vary_by(spread: float) -> None:
    divergence = guard()
    trained(divergence, 3000, spread=spread)
    assert (divergence.lr_factor, divergence.num_roll_backs, divergence.last_applied) == (1.0, 0, 3000)


def test_no_loss_is_a_jump_before_the_window_is_full_or_when_off() -> None:
    divergence = guard()
    trained(divergence, 19)
    assert take(divergence, 20, 1e9)
    off = guard(jump_z=0.0)
    trained(off)
    assert take(off, 51, 1e9)


def test_a_jump_is_skipped_and_does_not_count_as_a_recent_loss() -> None:
    divergence = guard()
    step = trained(divergence)
    assert not take(divergence, step + 1, 9.0)
    assert "loss 9, " in str(divergence.why_not(loss=9.0, grad_norm=1.0))
    assert "robust standard deviations above the median of the last 20 steps (3" in str(
        divergence.why_not(loss=9.0, grad_norm=1.0)
    )
    assert take(divergence, step + 2, 3.0)
    assert divergence.skipped_in_row == 0


def test_a_fall_is_no_jump() -> None:
    divergence = guard()
    step = trained(divergence)
    assert take(divergence, step + 1, 1e-6)


def test_gradients_that_are_not_finite_are_left_to_the_loss_scale() -> None:
    divergence = guard()
    assert not take(divergence, 1, NAN, grad_norm=NAN)
    assert divergence.skipped_in_row == 0
    assert divergence.why_not(loss=NAN, grad_norm=1.0) == "loss nan"  # finite gradients of a loss that is not


def test_too_many_dropped_in_a_row_are_a_divergence() -> None:
    divergence = guard()
    step = trained(divergence)
    for number in range(3):
        assert not take(divergence, step + 1 + number, 9.0)
    with pytest.raises(
        DivergedError, match="4 steps in a row had a loss that is not finite or jumped"
    ) as caught:
        take(divergence, step + 4, math.inf)
    assert (caught.value.exit_code, caught.value.agreed) == (ExitCode.DIVERGED, True)
    assert caught.value.reason.endswith("(loss inf)")


def test_it_rolls_back_to_before_the_last_step_that_changed_the_parameters() -> None:
    divergence = guard()
    assert divergence.choose([10, 20]) is None  # nothing was applied yet
    assert trained(divergence) == 50
    assert divergence.choose([60, 50, 40, 30]) == 40
    assert divergence.choose([60, 50]) is None
    assert divergence.choose([]) is None


def test_a_roll_back_that_did_not_help_is_followed_by_one_to_an_older_checkpoint() -> None:
    divergence = guard()
    trained(divergence)
    divergence.rolled_back({"last_applied": 40}, step=40)
    divergence.last_applied = 45
    assert divergence.choose([40, 30, 20]) == 30
    assert divergence.choose([40]) == 40  # there is no older one: once more, with a still lower rate
    divergence.last_applied = 55
    assert divergence.choose([50, 40, 30]) == 50  # it got further meanwhile


def test_each_roll_back_lowers_the_rate_until_the_limit() -> None:
    divergence = guard(max_roll_backs=2, lr_factor=0.1)
    trained(divergence)
    saved = divergence.state()
    for number in (1, 2):
        assert divergence.may_roll_back
        divergence.rolled_back(saved, step=40)
        assert divergence.lr_factor == pytest.approx(0.1**number)
        assert divergence.skipped_in_row == 0
    assert not divergence.may_roll_back
    assert divergence.why_no_roll_back() == "rolled back 2 times already (guards.max_roll_backs)"
    assert guard(max_roll_backs=0).why_no_roll_back() == "guards.max_roll_backs = 0"
    assert "no checkpoint" in guard().why_no_roll_back()


def test_restored_it_decides_as_the_one_that_was_saved() -> None:
    divergence = guard()
    step = trained(divergence)
    take(divergence, step + 1, 9.0)
    again = guard()
    again.load_state(json.loads(json.dumps(divergence.state())))
    assert again.state() == divergence.state()
    for loss in (3.0, 9.0, 5.0):
        assert again.why_not(loss=loss, grad_norm=1.0) == divergence.why_not(loss=loss, grad_norm=1.0)
    again.load_state({})  # a checkpoint that was saved before there were guards
    assert again.state() == guard().state()
