"""What the experiments measure: traces compared, ranks that drift, samples, state outside of checkpoints."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hpctrain.data import Batch
from hpctrain.run.experiments.causes.observations import find_drift
from hpctrain.run.experiments.measuring.own_state import (
    GeneratorWatch,
    NoDropout,
    OwnState,
    variables_of_module,
)
from hpctrain.run.experiments.measuring.probes import _is_sum_of_two_means
from hpctrain.run.experiments.measuring.samples import as_fields, repeats_beyond, row_hashes, rows_not_finite
from hpctrain.run.experiments.measuring.trace import (
    RunTrace,
    StepTrace,
    collinearity,
    compare_traces,
    factor_between,
    keep,
)
from hpctrain.run.experiments.own_loop import _is_shuffled, rows_of
from hpctrain.run.experiments.subject import BatchRows

NUMBERS = TensorDataset(torch.arange(16))


class Stream(IterableDataset[int]):
    """Always the same order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


def trace(*values: float, gradient: float = 1.0) -> RunTrace:
    """A trace whose parameter has `values` after each step."""
    steps = []
    for value in values:
        tensors = [("weight", torch.tensor([1.0, value], dtype=torch.float64))]
        gradients = keep([("weight", torch.tensor([gradient, 0.0], dtype=torch.float64))])
        steps.append(
            StepTrace(
                loss=1.0, rows=BatchRows(indices=[0], hashes=[0]), gradients=gradients, parameters=keep(tensors),
                buffers=keep([]),
            )
        )  # fmt: skip
    return RunTrace(initial=keep([("weight", torch.zeros(2, dtype=torch.float64))]), steps=steps)


def test_the_first_step_and_tensor_that_differ_are_found() -> None:
    found = compare_traces(trace(0.5, 0.25), trace(0.5, 0.375), tolerance=1e-12)
    first = found.earliest
    assert first is not None
    assert (first.kind, first.step, first.tensor, first.absolute) == ("parameter", 2, "weight", 0.125)


def test_what_optimizers_make_of_a_gradient_that_is_only_rounding_is_not_compared() -> None:
    """The second element has no gradient; a difference of 1e-9 there is enlarged rounding, 1e-3 is not."""
    assert compare_traces(trace(0.5), trace(0.5 + 1e-9), tolerance=1e-12).equal
    assert not compare_traces(trace(0.5), trace(0.5 + 1e-3), tolerance=1e-12).equal


def test_running_statistics_may_follow_enlarged_rounding_and_nothing_else() -> None:
    for mean, enlarged, equal in ((1e-9, 1e-9, True), (1e-9, 0.0, False), (1e-3, 1e-9, False)):
        one, other = trace(0.5), trace(0.5 + enlarged)
        one.steps[0].buffers = keep([("mean", torch.ones(1, dtype=torch.float64))])
        other.steps[0].buffers = keep([("mean", torch.ones(1, dtype=torch.float64) + mean)])
        assert compare_traces(one, other, tolerance=1e-12).equal is equal


def test_nan_in_the_same_place_is_equal() -> None:
    assert compare_traces(trace(float("nan")), trace(float("nan")), tolerance=1e-12).equal
    assert not compare_traces(trace(1.0), trace(float("nan")), tolerance=1e-12).equal


def test_a_resumed_run_is_compared_with_the_steps_that_it_repeats() -> None:
    assert compare_traces(trace(0.1, 0.2, 0.3), trace(0.3), tolerance=1e-12, from_step=3).equal
    assert not compare_traces(trace(0.1, 0.2, 0.3), trace(0.1), tolerance=1e-12, from_step=3).equal


def test_gradients_that_are_multiples_have_a_factor_and_others_do_not() -> None:
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0])}
    assert factor_between(a, {name: 0.5 * value for name, value in a.items()}) == pytest.approx(0.5)
    clamped = {"x": torch.tensor([1.0, 1.0]), "y": torch.tensor([3.0])}
    assert factor_between(a, clamped) is None
    residual = collinearity(a, clamped)
    assert residual is not None
    assert residual.tensor == "x"


def ranks(**second: Any) -> list[dict[str, Any]]:
    step = {"before": {"w": 1}, "gradients": {"w": 2}, "options": [{"lr": 0.1}], "after": {"w": 3}}
    return [{"initial": {"w": 0}, "steps": [step]}, {"initial": {"w": 0}, "steps": [{**step, **second}]}]


@pytest.mark.parametrize(
    ("changed", "phase"),
    [
        ({"before": {"w": 9}, "after": {"w": 9}}, "forward"),
        ({"options": [{"lr": 0.2}], "after": {"w": 9}}, "option"),
        ({"gradients": {"w": 9}, "after": {"w": 9}}, "gradient"),
        ({"after": {"w": 9}}, "optimizer"),
    ],
)
def test_the_phase_of_a_drift_is_what_differs_first(changed: dict[str, Any], phase: str) -> None:
    found = find_drift(ranks(**changed))
    assert found is not None
    assert (found.phase, found.ranks, found.step) == (phase, [1], 1)
    assert find_drift(ranks()) is None


def test_repeats_are_those_beyond_one_process() -> None:
    assert repeats_beyond([1, 2, 3, 4], [[1, 3], [2, 4]]) == ({}, 0)
    assert repeats_beyond([1, 2, 3, 4], [[1, 2], [1, 2]]) == ({"1": 2, "2": 2}, 2)


def test_rows_are_told_apart_by_their_content_in_nested_batches() -> None:
    batch = {"x": (torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 0, 0]))}
    fields = as_fields(batch)
    assert set(fields) == {"x.0", "x.1"}
    first, second, third = row_hashes(fields, 3)
    assert first == third != second
    assert rows_not_finite({"x": torch.tensor([[1.0], [float("inf")]])}, 2) == [(1, "x")]


class Task:
    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(2)
        self.own, self.old = np.random.default_rng(0), random.Random(0)
        self.inner = {"list": [1, 2]}

    def use(self) -> None:
        self.calls += 1
        self.mean = self.mean + 1
        self.own.normal(), self.old.random()
        self.inner["list"][1] = 3
        self.late = 5


def test_state_outside_of_checkpoints_is_found_and_carried_over() -> None:
    task, fresh = Task(), Task()
    before = OwnState.of({"task": task})
    task.use()
    after = OwnState.of({"task": task})
    changed = after.changed_since(before)
    assert {path: kind for path, kind in changed.items() if kind == "generator"} == {
        "task.own": "generator", "task.old": "generator",
    }  # fmt: skip
    assert {"task.calls", "task.mean", "task.inner['list'][1]", "task.late"} <= set(changed)
    after.put_into({"task": fresh}, changed)
    assert (fresh.calls, fresh.inner, fresh.late) == (1, {"list": [1, 3]}, 5)
    assert fresh.own.normal() == task.own.normal()
    assert fresh.old.random() == task.old.random()


def test_parameters_and_saved_buffers_are_in_the_checkpoint_and_others_are_not() -> None:
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("scale", torch.ones(1), persistent=False)
    found = OwnState.of({"model": model}).kinds
    assert found["model.scale"] == "buffer"
    assert not any(name in path for path in found for name in ("running_mean", "weight"))


def test_a_second_model_is_outside_of_the_checkpoint_and_its_parameters_stay_the_same_objects() -> None:
    model, teacher, late = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    roots = {"model": model, "task": {"model": model, "teacher": teacher}}
    before = OwnState.of(roots)
    with torch.no_grad():
        teacher.weight.add_(1)
        model.weight.add_(1)
    after = OwnState.of(roots)
    changed = after.changed_since(before)
    assert list(changed) == ["task['teacher'].weight"]
    weight = late.weight
    assert after.put_into({"model": model, "task": {"model": model, "teacher": late}}, changed) == 1
    assert late.weight is weight
    assert torch.equal(weight, teacher.weight)


def test_large_arrays_are_data() -> None:
    class Holder:
        table, count = np.zeros(3 << 20), 0

        def __init__(self) -> None:
            self.table, self.small = np.zeros(3 << 20), np.zeros(3)

    assert list(OwnState.of({"task": Holder()}).values) == ["task.small"]


COUNT = 0


def test_variables_of_the_users_module_are_put_back() -> None:
    global COUNT
    roots = {"script": variables_of_module(test_large_arrays_are_data)}
    before = OwnState.of(roots)
    COUNT = 3
    assert OwnState.of(roots).changed_since(before)["script.COUNT"] == "value"
    before.put_into(roots, {"script.COUNT": "value"})
    assert COUNT == 0
    assert variables_of_module(torch.nn.functional.relu) is None
    assert variables_of_module(random.random) is None


def test_a_sum_of_two_means_is_told_from_other_functions_of_a_batch() -> None:
    def of(function: Callable[[float, float], float]) -> bool:
        shares = [number / (1 + number) for number in range(1, 9)]  # copies of some samples, with others
        heavier = [number / (3 + number) for number in range(1, 9)]
        return _is_sum_of_two_means([function(*both) for both in zip(shares, heavier, strict=True)])

    assert of(lambda share, heavier: 0.3 + 0.5 * share + 0.7 * heavier)
    assert not of(lambda share, heavier: (0.3 + 0.5 * share) ** 0.5)
    assert not of(lambda share, heavier: math.log(0.3 + 0.5 * share) * share)
    assert not of(lambda share, heavier: float("nan"))


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (DataLoader(NUMBERS, batch_size=4), None),
        (DataLoader(NUMBERS, batch_size=4, shuffle=True), True),
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)), True),
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0, shuffle=False)), False),
        (DataLoader(NUMBERS, sampler=range(0, 16, 2)), None),
        (DataLoader(NUMBERS, sampler=[3, 1, 2]), True),
        (DataLoader(Stream()), None),
        ([torch.zeros(4)], None),
    ],
)
def test_only_a_sampler_that_shuffles_should_give_epochs_other_orders(
    batches: Any, expected: bool | None
) -> None:
    assert _is_shuffled(batches) is expected
    assert _is_shuffled(lambda epoch: batches) is expected


def test_variables_of_an_enclosing_function_are_found() -> None:
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    before = OwnState.of({"step": step})
    step()
    after = OwnState.of({"step": step})
    assert after.changed_since(before) == {"step.count": "value"}
    before.put_into({"step": step}, {"step.count": "value"})
    assert count == 0


def test_dropout_off_draws_nothing_and_other_draws_are_seen() -> None:
    device, x = torch.device("cpu"), torch.ones(4, 4)
    with GeneratorWatch(device) as watch, NoDropout():
        assert torch.equal(functional.dropout(x, 0.5), x)
        assert torch.equal(torch.nn.Dropout(0.5)(x), x)
    assert watch.used == frozenset()
    with GeneratorWatch(device) as watch, NoDropout():
        random.random()
        np.random.rand()
    assert watch.used == {"python", "numpy"}


def test_samples_that_are_not_finite_are_named_by_their_index_in_the_dataset() -> None:
    fields = {"x": torch.tensor([[1.0], [math.nan], [2.0], [math.inf]]), "y": torch.zeros(4)}
    batch = Batch(
        fields=fields, epoch=0, start=0, num_samples=4, global_samples=4, indices=torch.tensor([70, 71, 5, 6])
    )

    assert rows_of(batch).not_finite == [(71, "x"), (6, "x")]
    assert rows_of(batch).names() == [70, 71, 5, 6]
    assert rows_of(fields).not_finite == [(1, "x"), (3, "x")]  # by row: no indices are known
