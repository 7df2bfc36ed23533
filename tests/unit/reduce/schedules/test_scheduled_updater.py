"""What each worker holds of its own, on ranks that are threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce import LossScale
from hpctrain.train import Position
from tests.ranks.reduce.schedule_cases import Case, Trial, loss_of, share_of

NODES = {2: "ab", 3: "abc"}
ROUNDS_OF_NINE = Case({"method": "local-sgd", "every": 9}, "adamw")


def trial_of(world: World, case: Case = ROUNDS_OF_NINE) -> Trial:
    scale = LossScale(value=2.0**10, dynamic=True, growth_steps=2)
    return Trial(world, case, nodes=NODES[world.num_ranks], loss_scale=scale)


def overflow(trial: Trial, step: int) -> None:
    """A step whose gradients are not finite on rank 1."""
    rank, num_ranks = trial.session.rank, trial.session.world_size
    loss = loss_of(trial.model, step, rank) * (torch.inf if rank == 1 else 1.0)
    trial.updater.backward(loss, weight=share_of(rank, num_ranks))
    trial.outcomes.append(trial.updater.step())


def test_each_worker_has_a_loss_scale_of_its_own_which_is_resumed(tmp_path: Path) -> None:
    def save(world: World) -> tuple[LossScale, list[bool]]:
        trial = trial_of(world)
        trial.train(0, 3)
        overflow(trial, 3)
        trial.session.save_state(tmp_path, trial.updater, Position(step=4))
        found = trial.updater.loss_scale
        trial.close()
        return found, [outcome.applied for outcome in trial.outcomes]

    def load(world: World) -> LossScale:
        trial = trial_of(world)
        trial.session.load_state(tmp_path, trial.updater)
        trial.close()
        return trial.updater.loss_scale

    saved = run_threads(2, save, timeout_s=300)
    assert [applied for _, applied in saved] == [[True] * 4, [True, True, True, False]]
    scales = [scale for scale, _ in saved]
    assert [scale.value for scale in scales] == [2.0**12, 2.0**10]
    assert [scale.skipped_in_row for scale in scales] == [0, 1]
    assert run_threads(2, load, timeout_s=300) == scales
    assert {scale.value for scale in run_threads(3, load, timeout_s=300)} == {2.0**10}


def test_in_a_step_with_a_vote_all_ranks_learn_whether_any_worker_made_it() -> None:
    def case(world: World) -> tuple[bool, bool, bool]:
        trial = trial_of(world, Case({"method": "local-sgd", "every": 1}))
        overflow(trial, 0)
        [outcome] = trial.outcomes
        same = trial.values()
        trial.updater.end_round()
        unchanged = all(torch.equal(a, b) for a, b in zip(same, trial.values(), strict=True))
        trial.close()
        return outcome.applied, outcome.grad_norm > 0, unchanged

    assert run_threads(2, case, timeout_s=300) == [(True, True, True)] * 2


def test_an_updater_is_closed_while_an_average_is_on_its_way() -> None:
    def case(world: World) -> bool:
        trial = trial_of(world, Case({"method": "daso", "every": 3, "wait": 2}))
        trial.train(0, 4)
        ended = trial.updater.close()
        trial.close()
        return ended

    assert run_threads(2, case, timeout_s=300) == [True, True]


def test_a_grad_scaler_is_refused() -> None:
    def case(world: World) -> str:
        trial = trial_of(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(trial.model, 0, world.rank)).backward()
        with pytest.raises(UsageError) as caught:
            scaler.unscale_(trial.updater)  # type: ignore[arg-type]
        trial.close()
        return str(caught.value)

    for text in run_threads(2, case, timeout_s=300):
        assert "would then be a step behind" in text


def test_state_is_loaded_between_steps_only() -> None:
    def case(world: World) -> str:
        trial = trial_of(world)
        state = trial.updater.state()
        trial.updater.backward(loss_of(trial.model, 0, world.rank), weight=0.5)
        with pytest.raises(UsageError) as caught:
            trial.updater.load_state(state)
        trial.close()
        return str(caught.value)

    assert set(run_threads(2, case, timeout_s=300)) == {
        "load_state was called between backward and step(): call it between steps"
    }
