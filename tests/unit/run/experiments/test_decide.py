"""From observations to causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.run.experiments.causes.decide import find_causes
from hpctrain.run.experiments.causes.findings import Cause, CheckReport
from hpctrain.run.experiments.causes.observations import EQUAL, Drift, Observations, Resumptions
from hpctrain.run.experiments.measuring.probes import EvaluationFacts, LossFacts, LowPrecision
from hpctrain.run.experiments.measuring.samples import SampleFacts
from hpctrain.run.experiments.measuring.trace import FirstDifference, Residual, TrialComparison

SOUND = Observations(
    num_ranks=2, steps=4, tolerance=1e-12, double=True, asks_double=False, micro=EQUAL, resumed=Resumptions(),
    ranks_micro=EQUAL, ranks_resumed=EQUAL, loss=LossFacts(kind="mean"),
)  # fmt: skip


def apart(
    kind: str = "loss", step: int = 1, tensor: str = "the loss", *, factor: float | None = None
) -> TrialComparison:
    found = FirstDifference(kind=kind, step=step, tensor=tensor, relative=0.02, absolute=0.01, worst=0.05)
    return TrialComparison(first={kind: found}, worst=0.05, factor=factor)


def causes(observations: Observations) -> list[Cause]:
    return [finding.cause for finding in find_causes(observations) if finding.is_difference]


def test_nothing_is_found_where_all_is_equal() -> None:
    assert find_causes(SOUND) == []


DIVIDED = replace(SOUND, ranks=apart(), micro=apart(), ranks_micro=apart())
CASES = {
    "a mean over tokens": (
        replace(DIVIDED, loss=LossFacts(kind="weighted", off=0.01, weights=(1.0, 1.3))), Cause.LOSS_WEIGHTS,
    ),
    "batch norm": (
        replace(DIVIDED, loss=LossFacts(kind="whole", mixes=("norm", "BatchNorm1d", 0.4))), Cause.BATCH_STATISTICS,
    ),
    "a loss of pairs": (replace(DIVIDED, loss=LossFacts(kind="whole", off=0.3)), Cause.BATCH_STATISTICS),
    "a summed loss": (replace(DIVIDED, loss=LossFacts(kind="sum", off=0.5)), Cause.ACCUMULATION),
    "means over two different things": (
        replace(DIVIDED, loss=LossFacts(kind="mixed", off=0.1)), Cause.LOSS_WEIGHTS,
    ),
    "a loop's own parts of unequal sizes": (
        replace(DIVIDED, loss=LossFacts(kind="weighted", off=0.1, weights=(1.0, 2.0), part_sizes=(5, 5, 2))),
        Cause.ACCUMULATION,
    ),
    "a loop's own parts of equal sizes": (
        replace(DIVIDED, loss=LossFacts(kind="weighted", off=0.1, weights=(1.0, 2.0), part_sizes=(6, 6))),
        Cause.LOSS_WEIGHTS,
    ),
    "a hook that clips gradients": (replace(SOUND, ranks=apart("gradient", 1, "0.weight")), Cause.GRADIENTS),
    "gradients that differ later only": (replace(SOUND, ranks=apart("gradient", 2, "0.weight")), Cause.UNKNOWN),
    "unweighted parts in a loop": (
        replace(SOUND, ranks=apart(factor=0.5), loss=LossFacts(kind="whole", off=0.3)), Cause.ACCUMULATION,
    ),
    "max_norm": (
        replace(
            SOUND, ranks=apart("parameter", 1, "0.weight"),
            drift=Drift(step=1, phase="forward", name="0.weight", ranks=[1]),
        ),
        Cause.DRIFT,
    ),
    "plateau": (
        replace(
            SOUND, ranks=apart("parameter", 3, "0.weight"),
            drift=Drift(step=3, phase="option", name="lr", ranks=[1], values=("0.1", "0.05")),
        ),
        Cause.LEARNING_RATE,
    ),
    "a scheduler that has not changed the learning rate yet": (
        replace(
            SOUND,
            schedules_apart=Drift(step=4, phase="scheduler", name="step.plateau.best", ranks=[1], values=("1", "2")),
        ),
        Cause.LEARNING_RATE,
    ),
    "own draws that were alike by chance": (
        replace(SOUND, own_generators=["task.rng"], own_draws_matter=True), Cause.OWN_RANDOM,
    ),
    "a momentum of each rank's own": (
        replace(
            SOUND, ranks=apart("parameter", 1, "0.weight"),
            drift=Drift(step=1, phase="option", name="momentum", ranks=[1], values=("0.9", "0.8")),
        ),
        Cause.OPTIMIZER,
    ),
    "a noisy optimizer": (
        replace(
            SOUND, ranks=apart("parameter", 1, "0.weight"), draws=["torch"], draws_left=["torch"], reseeded=apart(),
            drift=Drift(step=1, phase="optimizer", name="0.weight", ranks=[1]),
        ),
        Cause.OPTIMIZER,
    ),
    "a grad scaler, at some timings": (
        replace(
            SOUND, ranks_again=apart("gradient", 3, "0.bias"),
            tampered=(3, Residual(factor=1.0, relative=0.6, tensor="0.bias")),
        ),
        Cause.GRADIENTS,
    ),
    "an error of several ranks about gradients": (
        replace(
            SOUND,
            ranks=TrialComparison(first={}, worst=0.0, failure="GradientsInUse: gradients were changed", failed_step=1),
        ),
        Cause.GRADIENTS,
    ),
    "a backward of several ranks that runs twice": (
        replace(
            SOUND,
            ranks=TrialComparison(first={}, worst=0.0, failure="BackwardRanTwice: call no_sync", failed_step=2),
        ),
        Cause.ACCUMULATION,
    ),
    "another error of several ranks": (
        replace(
            SOUND,
            ranks=TrialComparison(first={}, worst=0.0, failure="ValueError: gradients changed", failed_step=2),
        ),
        Cause.REFUSED,
    ),
    "a transform that draws other numbers each time": (
        replace(SOUND, again=apart(), samples=SampleFacts(content_by_rank=[3], content_changes=[3])),
        Cause.OWN_RANDOM,
    ),
    "a transform that draws from the process's generator": (
        replace(
            SOUND, ranks=apart(), samples=SampleFacts(content_by_share=[3], content_unstable=[3], draws=["numpy"])
        ),
        Cause.OWN_RANDOM,
    ),
    "a dataset that draws, in a loop without numbers of samples": (
        replace(
            SOUND, ranks=apart(),
            samples=SampleFacts(
                content_by_share=[3], content_unstable=[3], is_numbered=False, history=True, other_steps=1
            ),
        ),
        Cause.OWN_RANDOM,
    ),
    "a sampler without a seed": (
        replace(SOUND, again=apart("samples"), samples=SampleFacts(order_changes=True, repeated={"3": 2, "4": 2})),
        Cause.OWN_RANDOM,
    ),
    "a learning rate of the number of ranks": (
        replace(SOUND, ranks=apart("option", 1, "lr (0.2 instead of 0.1)")), Cause.LEARNING_RATE,
    ),
    "a scheduler for each micro-batch": (
        replace(SOUND, micro=apart("option", 1, "lr (0.05 instead of 0.1)")), Cause.ACCUMULATION,
    ),
    "clipping for each micro-batch": (replace(SOUND, splits=True, micro=apart("gradient")), Cause.ACCUMULATION),
    "steps that are left out on several ranks": (
        replace(
            SOUND,
            again=TrialComparison(first={}, worst=0.0, steps=4, applied=4, expected=4),
            ranks=TrialComparison(first=apart("gradient").first, worst=1.0, steps=4, applied=0, expected=4),
            not_finite=["rank 1, step 1: the loss (nan) is not finite"],
        ),
        Cause.NOT_FINITE,
    ),
    "a transform by rank": (
        replace(SOUND, ranks=apart(), samples=SampleFacts(content_by_rank=[3])), Cause.DATA_BY_RANK,
    ),
    "a transform by share": (
        replace(SOUND, ranks=apart(), samples=SampleFacts(content_by_share=[3])), Cause.DATA_BY_RANK,
    ),
    "a sampler without ranks": (
        replace(SOUND, ranks=apart(), samples=SampleFacts(repeated={str(n): 2 for n in range(9)}, other_steps=1)),
        Cause.REPEATED,
    ),
    "no set_epoch": (replace(SOUND, samples=SampleFacts(same_every_epoch=True)), Cause.DATA_ORDER),
    "persistent workers": (replace(SOUND, samples=SampleFacts(history=True)), Cause.DATA_ORDER),
    "another batch size": (
        replace(SOUND, ranks=apart(), samples=SampleFacts(other_steps=1, num_rows=16, num_rank_rows=32)),
        Cause.DATA_ORDER,
    ),
    "an unseeded generator": (
        replace(DIVIDED, again=apart(), fresh_generators=["task.generator"], resumed=Resumptions(plain=apart())),
        Cause.OWN_RANDOM,
    ),
    "addresses of objects": (
        replace(DIVIDED, again=apart(), loss=LossFacts(kind="whole", off=0.3)), Cause.NOT_DETERMINISTIC,
    ),
    "a generator that is not saved": (
        replace(SOUND, own_generators=["task.generator"], resumed=Resumptions(plain=apart(), with_generators=EQUAL)),
        Cause.OWN_RANDOM,
    ),
    "an attribute that is not saved": (
        replace(
            SOUND, own_state={"task.calls": "value"},
            resumed=Resumptions(plain=apart(), with_generators=apart(), with_state=EQUAL),
        ),
        Cause.OWN_STATE,
    ),
    "a buffer that is not saved": (
        replace(SOUND, own_state={"model.scale": "buffer"}, resumed=Resumptions(plain=apart(), with_state=EQUAL)),
        Cause.BUFFER,
    ),
    "a buffer of each rank's samples": (
        replace(SOUND, ranks=apart("buffer", 1, "norm"), ranks_resumed=apart(), buffers_apart=["norm"]), Cause.BUFFER,
    ),
    "dropout in evaluation": (
        replace(SOUND, evaluation=EvaluationFacts(differs={"loss": 0.1}, draws=["torch"])), Cause.EVALUATION,
    ),
    "batch norm in training mode": (
        replace(SOUND, evaluation=EvaluationFacts(training=[("norm", "BatchNorm1d")], changed=["norm.running_mean"])),
        Cause.EVALUATION,
    ),
    "float32 inside": (
        replace(
            SOUND, asks_double=True,
            low_precision=[LowPrecision(module="head", operation="aten._to_copy", dtype="float32")],
        ),
        Cause.FLOAT32,
    ),
    "a poisoned mean": (
        replace(SOUND, poisoned=["norm.running_mean"], samples=SampleFacts(not_finite={"x": [3]})),
        Cause.BUFFER_NOT_FINITE,
    ),
    "noise": (
        replace(
            SOUND, ranks=apart(), draws=["torch"], draws_left=["torch"], reseeded=apart(),
            loss=LossFacts(kind="whole", off=0.1),
        ),
        Cause.RANDOM,
    ),
    "nothing that is known": (replace(SOUND, ranks=apart()), Cause.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_first(name: str) -> None:
    observations, cause = CASES[name]
    assert causes(observations)[:1] == [cause]


def left_out(applied: int) -> TrialComparison:
    return TrialComparison(first={}, worst=0.0, steps=4, applied=applied, expected=applied)


@pytest.mark.parametrize(
    "not_finite", [["step 1: field x in samples 3 is not finite", "step 1: the loss"], []]
)
def test_runs_without_a_step_that_was_applied_are_not_equal(not_finite: list[str]) -> None:
    none = left_out(0)
    idle = replace(
        SOUND, again=none, micro=none, resumed=Resumptions(plain=none), ranks=none, ranks_again=none, ranks_micro=none,
        ranks_resumed=none, not_finite=not_finite,
    )  # fmt: skip
    found = find_causes(idle)
    assert [f.cause for f in found if f.is_difference] == [Cause.NOT_APPLIED]
    assert all(line in f"{found[0].text} {found[0].evidence}" for line in not_finite)
    assert (
        CheckReport(name="task", observations=idle, findings=found)
        .lines()[-1]
        .startswith("nothing was compared")
    )


def test_steps_that_all_runs_leave_out_are_a_note() -> None:
    found = find_causes(
        replace(SOUND, again=left_out(2), ranks=left_out(2), not_finite=["step 1: the loss (nan)"])
    )
    assert [(f.cause, f.is_difference) for f in found] == [(Cause.NOT_FINITE, False)]
    assert "2 of 4 steps" in found[0].text
    assert "step 1: the loss (nan)" in found[0].text


def test_dropout_alone_is_no_difference() -> None:
    found = find_causes(replace(SOUND, no_dropout=True, draws=["torch"]))
    assert [(f.cause, f.is_difference) for f in found] == [(Cause.RANDOM, False)]


def test_float32_in_a_float32_recipe_is_a_note_unless_something_differs() -> None:
    low = [LowPrecision(module="head", operation="aten._to_copy", dtype="float32")]
    assert causes(replace(SOUND, low_precision=low)) == []
    assert causes(replace(SOUND, low_precision=low, ranks=apart())) == [Cause.FLOAT32]


def test_samples_that_fill_the_last_batch_are_a_note() -> None:
    found = find_causes(replace(SOUND, samples=SampleFacts(repeated={"5": 2})))
    assert [(f.cause, f.is_difference) for f in found] == [(Cause.REPEATED, False)]


def test_equal_samples_of_the_data_are_a_note() -> None:
    samples = SampleFacts(num_seen=10, repeated_one={"7": 3}, has_equal=True)
    assert causes(replace(SOUND, samples=samples)) == []
    assert [f.cause for f in find_causes(replace(SOUND, samples=samples))] == [Cause.REPEATED]
    assert causes(replace(SOUND, samples=replace(samples, repeated={"3": 2, "4": 2}))) == [Cause.REPEATED]


def test_samples_drawn_with_replacement_are_meant() -> None:
    assert find_causes(replace(SOUND, repeats_intended=True, samples=SampleFacts(repeated={"5": 9}))) == []


def test_micro_batches_of_synchronised_batch_norm_are_a_note() -> None:
    found = find_causes(
        replace(SOUND, micro=apart(), loss=LossFacts(kind="mean", mixes=("norm", "BatchNorm1d", 0.4)))
    )
    assert [(f.cause, f.is_difference) for f in found] == [(Cause.BATCH_STATISTICS, False)]


def test_a_buffer_that_each_forward_changes_is_a_note_without_micro_batches_and_a_cause_with_them() -> None:
    first = {**apart("loss").first, **apart("buffer", 1, "norm").first}
    observed = replace(
        SOUND,
        micro=TrialComparison(first=first, worst=0.1),
        ranks_micro=TrialComparison(first=first, worst=0.1),
    )
    assert [(f.cause, f.is_difference) for f in find_causes(observed)] == [(Cause.BUFFER, False)]
    assert causes(replace(observed, splits=True)) == [Cause.BUFFER]


def test_a_cause_seen_in_the_run_comes_before_one_that_takes_other_data() -> None:
    found = causes(replace(DIVIDED, poisoned=["mean"], loss=LossFacts(kind="sum", off=0.5)))
    assert found == [Cause.ACCUMULATION, Cause.BUFFER_NOT_FINITE]


def test_the_words_say_what_differs_by_how_much_and_from_which_step_on() -> None:
    found = find_causes(replace(SOUND, ranks=apart("gradient", 3, "head.weight")))[0]
    assert any(
        "gradient head.weight differs from step 3 on, by 2 %, later up to 5 %" in line
        for line in found.evidence
    )
