"""Runs all experiments with a `Subject`, a user's training, and returns the observations. Collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from hpctrain.comm import all_gather_json
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.run.experiments.causes.decide import cause_of_error
from hpctrain.run.experiments.causes.findings import Cause
from hpctrain.run.experiments.causes.observations import (
    Observations,
    Resumptions,
    find_drift,
    schedulers_apart,
)
from hpctrain.run.experiments.measuring.own_state import OwnState
from hpctrain.run.experiments.measuring.probes import (
    EvaluationFacts,
    LossFacts,
    LowPrecision,
    find_low_precision,
    first_not_finite,
    metrics_apart,
    probe_evaluation,
    probe_loss,
    probe_not_finite,
    unchanged,
)
from hpctrain.run.experiments.measuring.samples import SampleFacts
from hpctrain.run.experiments.measuring.trace import (
    Failure,
    Residual,
    RunTrace,
    TrialComparison,
    collinearity,
    compare_traces,
    merge,
    with_losses,
)
from hpctrain.run.experiments.sample_pass import pass_over_samples
from hpctrain.run.experiments.subject import Subject, Trial
from hpctrain.run.experiments.trials import Conditions, Ran, Trials

TOLERANCE = 1e-12
# float32 has 7 digits, some of which are lost by sums in another order and a few steps of training.
TOLERANCE_FLOAT32 = 2e-5
STEPS = 4
_SHOWN = 4
_DIVISIONS = 4
_TAMPERED = {True: 1e-9, False: 1e-3}


@final
class Experiments:
    """Runs experiments with a subject on one rank and on all ranks of `session`. `say` prints progress on rank 0."""

    def __init__(
        self, subject: Subject, session: Any, *, steps: int = STEPS, say: Callable[[str], None]
    ) -> None:
        self._subject = subject
        self._session = session
        self._steps = steps
        self._say = say
        self._trials: Trials
        self._tolerance = TOLERANCE

    # ------------------------------------------------------------------ the experiments

    def observe(self) -> Observations:
        """Runs all experiments and returns what was observed.

        Raises an error on every rank if the first run of the training, on one rank and unchanged, fails without a known
        cause.
        """
        first_state = OwnState.of(self._subject.variables())
        one = self._first(first_state)
        if isinstance(one, Failure):
            return Observations(
                num_ranks=self._session.world_size, steps=self._steps, tolerance=self._tolerance,
                double=self._trials.double, asks_double=self._subject.asks_double,
                refused=f"{one.kind}: {one.text}", refused_step=one.step,
            )  # fmt: skip
        say, double = self._say, self._trials.double
        low = self._low_precision()
        say("1 rank, repeated")
        again = self._run(Conditions())
        draws = self._draws(one.trace)
        no_dropout, left, plain = False, draws, one
        if draws:
            say("1 rank, without dropout")
            plain = self._run(Conditions(dropout=False))
            left = self._draws(plain.trace)
            no_dropout = left != draws
        drop = not no_dropout
        plain = plain if no_dropout else one
        reseeded = None
        if left:
            say("1 rank, with other random numbers")
            reseeded = self._compared(plain, self._run(Conditions(dropout=drop, seed_change=1)))
        micro = None
        if self._subject.can_split:
            say("1 rank, in 2 micro-batches")
            micro = self._compared(plain, self._run(Conditions(dropout=drop, micro_batches=2)))
        say("1 rank, stopped and resumed")
        resumed = self._resumptions(one)
        ranks = self._on_ranks(one, plain, drop=drop)
        say("samples, evaluation, loss and buffers")
        samples = self._samples(one, again, ranks, resumes_equal=resumed.plain.equal)
        divides = ranks.observed["ranks"].equal and (micro is None or micro.equal)
        evaluation, apart, loss, poisoned = self._probes(divisions=1 if divides else _DIVISIONS)
        kept = one.ended.changed_since(one.began)
        generators = [path for path, kind in kept.items() if kind == "generator"]
        again_compared = self._compared(one, again)
        not_finite = self._not_finite(one, ranks.natural)
        return Observations(
            num_ranks=self._session.world_size, steps=self._steps, tolerance=self._tolerance, double=double,
            asks_double=self._subject.asks_double, again=again_compared, micro=micro, resumed=resumed,
            reseeded=reseeded, no_dropout=no_dropout, draws=draws, draws_left=left,
            own_generators=generators,
            own_draws_matter=again_compared.equal and resumed.plain.equal and self._own_draws_matter(one, generators),
            fresh_generators=[p for p, kind in again.began.changed_since(one.began).items() if kind == "generator"],
            own_state={path: kind for path, kind in kept.items() if kind != "generator"},
            samples=samples, loss=loss, low_precision=low, evaluation=evaluation, evaluation_apart=apart,
            poisoned=poisoned, not_finite=not_finite, no_gradients=_all_zero(one.trace),
            splits=self._subject.splits, repeats_intended=self._subject.repeats_samples,
            **ranks.observed,
        )  # fmt: skip

    def _first(self, first_state: OwnState) -> Ran | Failure:
        """Runs the reference trial, a short run of the training: on one rank, in float64 if the model supports it.

        Returns its result, or a `Failure` if a step raises an error of hpctrain with a known cause.
        """
        for double in (True, False):
            self._tolerance = TOLERANCE if double else TOLERANCE_FLOAT32
            self._trials = Trials(
                self._subject, self._session, steps=self._steps, double=double, first_state=first_state
            )
            self._say(f"1 rank, {self._steps} steps in {'float64' if double else 'float32'}")
            ran: Ran | None = None
            failure: Failure | None = None
            error = HpctrainError("another rank has failed")
            try:
                ran = self._run(Conditions())
                if (failure := ran.trace.failure) is not None:
                    ran, error = (
                        None,
                        UsageError(f"step {failure.step} on 1 rank: {failure.kind}: {failure.text}"),
                    )
            except HpctrainError as found:
                error = found
            except Exception as found:  # the user's code may raise anything
                error = UsageError(f"the training cannot be built on 1 rank: {type(found).__name__}: {found}")
            may_retry = double and not self._subject.asks_double and _is_of_dtypes(str(error))
            outcome = "done" if ran is not None else "dtype" if may_retry else "failed"
            outcomes = all_gather_json(self._session.world, outcome)
            if ran is not None and all(other == "done" for other in outcomes):
                return ran
            if "failed" in outcomes and all(all_gather_json(self._session.world, _names_cause(failure))):
                assert failure is not None
                return failure
            if "failed" in outcomes:
                raise type(error)(str(error), agreed=True) from error
        raise AssertionError("float32 is the last try")

    def _run(self, conditions: Conditions) -> Ran:
        ran = self._trials.run(conditions)
        if not self._subject.loss_is_share or conditions.on_ranks:
            ran = replace(ran, trace=self._with_losses(ran.trace, on_ranks=conditions.on_ranks))
        return ran

    def _with_losses(self, trace: RunTrace, *, on_ranks: bool) -> RunTrace:
        """Returns the record `trace` of a trial with each step's loss replaced by the loss over all ranks.

        on_ranks: False for a trial on one rank, whose record is returned unchanged.
        """
        if not on_ranks:
            return trace
        mine = [[step.loss, len(step.rows.hashes)] for step in trace.steps]
        everyone = all_gather_json(self._session.world, mine)
        losses = []
        for number in range(len(trace.steps)):
            parts = [rank[number] for rank in everyone if number < len(rank)]
            if self._subject.loss_is_share:
                losses.append(math.fsum(loss for loss, _ in parts))
            else:
                total = sum(rows for _, rows in parts)
                losses.append(
                    math.fsum(loss * (rows / total if total else 1 / len(parts)) for loss, rows in parts)
                )
        return with_losses(trace, losses)

    def _compared(
        self, reference: Ran, other: Ran, *, samples: bool = True, from_step: int = 1
    ) -> TrialComparison:
        """Compares the results of two trials on each rank, and merges the comparisons of all ranks. Collective.

        reference: the trial with which `other` is compared.
        samples: whether each rank should get the same samples in both trials.
        from_step: the step of `reference` that corresponds to the first step of `other`.
        """
        mine = compare_traces(
            reference.trace, other.trace, tolerance=self._tolerance, samples=samples, from_step=from_step
        )
        return merge(
            [TrialComparison.of_json(value) for value in all_gather_json(self._session.world, mine.as_json())]
        )

    def _draws(self, trace: RunTrace) -> list[str]:
        """Returns the random number generators that any rank used in the steps of a trial. Collective.

        trace: this rank's record of the trial.

        The ranks may differ, since threads that read ahead draw numbers at different times.
        """
        mine = sorted({name for step in trace.steps for name in step.draws})
        return sorted({name for names in all_gather_json(self._session.world, mine) for name in names})

    def _resumptions(self, one: Ran) -> Resumptions:
        stop = self._steps // 2
        first = stop + 1

        def resumed(carried: str | None = None) -> tuple[Ran, TrialComparison]:
            ran = self._run(Conditions(stop_at=stop, carried=carried))
            return ran, self._compared(
                one, ran, from_step=first if len(ran.trace.steps) <= self._steps - stop else 1
            )

        _, plain = resumed()
        if plain.equal:
            return Resumptions(plain=plain)
        with_generators, with_state = resumed("generator"), resumed("value")
        return Resumptions(
            plain=plain,
            with_generators=with_generators[1] if with_generators[0].carried else None,
            with_state=with_state[1] if with_state[0].carried else None,
        )

    def _own_draws_matter(self, one: Ran, generators: Sequence[str]) -> bool:
        """Returns True if the training changes when the user's own generators draw other numbers. Collective."""
        if not any(all_gather_json(self._session.world, bool(generators))):
            return False
        self._say("1 rank, with other numbers of own generators")
        return any(not self._compared(one, self._run(Conditions(stirred=n))).equal for n in (1, 2))

    # ------------------------------------------------------------------ all ranks

    def _on_ranks(self, one: Ran, plain: Ran, *, drop: bool) -> _OnRanks:
        n, say = self._session.world_size, self._say
        say(f"{n} ranks")
        natural = self._run(Conditions(on_ranks=True))
        compared_run = natural if drop else self._run(Conditions(on_ranks=True, dropout=False))
        ranks = self._compared(plain, compared_run, samples=False)
        say(f"{n} ranks, repeated with delays")
        again = self._run(Conditions(on_ranks=True, delayed=True))
        ranks_again = self._compared(natural, again)
        micro = resumed = None
        if natural.trace.failure is None:
            if self._subject.can_split:
                say(f"{n} ranks, in 2 micro-batches")
                split = self._run(Conditions(on_ranks=True, dropout=drop, micro_batches=2))
                micro = self._compared(compared_run, split)
            say(f"{n} ranks, stopped and resumed")
            stop = self._steps // 2
            ran = self._run(Conditions(on_ranks=True, stop_at=stop))
            resumed = self._compared(natural, ran, from_step=stop + 1)
        whole = None
        if not ranks.equal and not natural.is_split and natural.trace.failure is None:
            say(f"{n} ranks that each compute all samples")
            ran = self._run(Conditions(on_ranks=True, dropout=drop, whole=True))
            whole = self._compared(plain, ran, samples=False)
        drift, tampered, buffers_apart, schedules_apart = None, None, [], None
        if not natural.is_split:
            everyone = all_gather_json(self._session.world, [_digests(r.trace) for r in (natural, again)])
            drift = find_drift([rank[0] for rank in everyone]) or find_drift([rank[1] for rank in everyone])
            steps = [rank[0]["steps"] for rank in everyone if rank[0]["steps"]]
            if steps:
                buffers_apart = [
                    b
                    for b, h in steps[0][0]["buffers"].items()
                    if any(s[0]["buffers"].get(b) != h for s in steps)
                ]
            tampered = self._tampered(natural.trace) or self._tampered(again.trace)
        if natural.trace.failure is None:
            schedulers = all_gather_json(self._session.world, natural.schedulers)
            schedules_apart = schedulers_apart(schedulers, step=self._steps)
        observed = {
            "ranks": ranks, "ranks_again": ranks_again, "ranks_micro": micro, "ranks_resumed": resumed, "whole": whole,
            "drift": drift, "tampered": tampered, "buffers_apart": buffers_apart, "is_split": natural.is_split,
            "schedules_apart": schedules_apart,
        }  # fmt: skip
        return _OnRanks(natural, observed)

    def _tampered(self, trace: RunTrace) -> tuple[int, Residual] | None:
        """Returns the first step in which the gradients that the optimizer gets are not what backward computed.

        They should be a multiple of the sum of the ranks' gradients from backward. The result is the step, from 1, and
        the distance from the closest multiple; None if there is no such step. Collective.
        """
        counts = all_gather_json(self._session.world, len(trace.steps))
        names = all_gather_json(self._session.world, [sorted(s.own_gradients) for s in trace.steps])
        for number in range(min(counts)):
            step = trace.steps[number]
            common = sorted(set.intersection(*(set(rank[number]) for rank in names)))
            if step.gradients is None or not common:
                continue
            flat = torch.cat([step.own_gradients[name] for name in common])
            self._session.world.all_reduce(flat)
            sizes = [step.own_gradients[name].numel() for name in common]
            sums = dict(zip(common, flat.split(sizes), strict=True))
            residual = collinearity(sums, step.gradients.values)
            found = residual is not None and residual.relative > _TAMPERED[self._trials.double]
            if any(all_gather_json(self._session.world, found)):
                return (number + 1, residual) if residual is not None else None
        return None

    # ------------------------------------------------------------------ samples and probes

    def _not_finite(self, one: Ran, natural: Ran) -> list[str]:
        """Returns lines of text about the first values that are not finite. Collective.

        If the run on one rank has such values, the lines are about that run, and name the module that causes them.
        Otherwise they are about the run on all ranks.
        """
        found = first_not_finite(one.trace)
        if any(all_gather_json(self._session.world, bool(found))):
            with self._trials.open(on_ranks=False) as trial:
                by_model = probe_not_finite(trial, trial.cleaned(_first_batch(trial)))
            if by_model is not None:
                found.append(f"in the first batch, with 0 for what is not finite in it: {by_model}")
            alone = all_gather_json(self._session.world, found)
            return next((list(lines) for lines in alone if lines), [])
        everyone = all_gather_json(self._session.world, first_not_finite(natural.trace))
        return [f"rank {rank}, {line}" for rank, lines in enumerate(everyone) for line in lines][:_SHOWN]

    def _samples(self, one: Ran, again: Ran, ranks: _OnRanks, *, resumes_equal: bool) -> SampleFacts:
        return pass_over_samples(
            self._trials,
            one=one.trace,
            again=again.trace,
            ranks=ranks.natural.trace,
            is_shuffled=self._subject.is_shuffled,
            resumes_equal=resumes_equal,
        )

    def _probes(
        self, *, divisions: int
    ) -> tuple[EvaluationFacts | None, dict[str, float], LossFacts | None, list[str]]:
        tolerance = self._tolerance
        with self._trials.open(on_ranks=False) as trial:
            evaluation = probe_evaluation(trial, tolerance=tolerance)
            batch = trial.cleaned(_first_batch(trial))
            num_rows = len(trial.rows(batch).hashes)
            loss = None
            with contextlib.suppress(Exception):  # the step may not accept batches of other sizes
                loss = probe_loss(trial, batch, num_rows=num_rows, tolerance=tolerance, divisions=divisions)
        apart: dict[str, float] = {}
        differs = any(all_gather_json(self._session.world, bool(evaluation and evaluation.differs)))
        if evaluation is not None and not differs:
            with self._trials.open(on_ranks=True) as trial, unchanged_if_whole(trial):
                metrics = trial.evaluate() or {}
            apart = metrics_apart(evaluation.metrics, metrics, tolerance=100 * tolerance)
        return evaluation, apart, loss, self._poisoned()

    def _low_precision(self) -> list[LowPrecision]:
        """Returns the operations of a float64 model that compute in a shorter dtype. Collective.

        If there are any with a shorter result, the tolerance is set to that of float32.
        """
        if not self._trials.double:
            return []
        with self._trials.open(on_ranks=False) as trial:
            low = find_low_precision(trial, trial.cleaned(_first_batch(trial)))
        rounds = any(not entry.is_mixed for entry in low)
        if any(all_gather_json(self._session.world, rounds)):
            self._tolerance = TOLERANCE_FLOAT32
        return [entry for entry in low if self._subject.asks_double or not entry.is_mixed]

    def _poisoned(self) -> list[str]:
        """Returns the names of what is not finite after a step on a batch with NaN and then a normal step."""
        with self._trials.open(on_ranks=False) as trial:
            batch = trial.cleaned(_first_batch(trial))
            bad = trial.poisoned(batch)
            if bad is None:
                return []
            try:
                losses = [trial.step(batch)]
                before = _names_not_finite(trial)
                losses += [trial.step(bad), trial.step(batch)]
            except Exception:  # the run refuses the batch, or ends as diverged
                return []
            found = [name for name in _names_not_finite(trial) if name not in before]
            if not found and math.isfinite(losses[0]) and not math.isfinite(losses[2]):
                found = ["the loss of later steps"]
            return found


class _OnRanks:
    def __init__(self, natural: Ran, observed: Mapping[str, Any]) -> None:
        self.natural = natural
        self.observed = observed


def unchanged_if_whole(trial: Trial) -> Any:
    return contextlib.nullcontext() if trial.is_split else unchanged(trial)


def _first_batch(trial: Trial) -> Any:
    batches = trial.batches(0)
    try:
        return next(batches)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def _names_cause(failure: Failure | None) -> bool:
    """Returns True if a step failed with an error of hpctrain whose class tells the cause."""
    return failure is not None and cause_of_error(f"{failure.kind}:") is not Cause.REFUSED


def _all_zero(trace: RunTrace) -> bool:
    """Returns True if there are gradients and all of them are 0 in every step."""
    kept = [step.gradients for step in trace.steps if step.gradients is not None and step.gradients.values]
    return bool(kept) and not any(bool(t.any()) for gradients in kept for t in gradients.values.values())


def _is_of_dtypes(text: str) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in ("dtype", "double", "float64", "scalar type"))


def _names_not_finite(trial: Trial) -> list[str]:
    """Returns the names of the parameters, buffers and values of the user's objects that contain NaN or infinity."""
    trial.updater.wait_for_parameters()
    named = [*trial.model.named_parameters(), *trial.model.named_buffers()]
    found = [name for name, t in named if t.is_floating_point() and not bool(t.isfinite().all())]
    return found + [
        path for path, value in OwnState.of(trial.roots()).values.items() if _is_not_finite(value)
    ]


def _is_not_finite(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    return isinstance(value, float) and not math.isfinite(value)


def _digests(trace: RunTrace) -> dict[str, Any]:
    """Returns the hashes of tensors and the optimizer options in a trial's record, as JSON values for `find_drift`."""
    steps = [
        {
            "before": dict(s.parameters_before.hashes) if s.parameters_before else None,
            "gradients": dict(s.gradients.hashes) if s.gradients else None,
            "options": s.options,
            "after": dict(s.parameters.hashes),
            "buffers": dict(s.buffers.hashes),
        }
        for s in trace.steps
    ]
    last = trace.unfinished
    if last is not None:
        after = dict(last.parameters.hashes)
        steps.append(
            {
                "before": dict(last.before.hashes) if last.before else after,
                "gradients": dict(last.gradients.hashes) if last.gradients else None,
                "options": last.options,
                "after": after,
                "buffers": {},
            }
        )
    return {"initial": dict(trace.initial.hashes), "steps": steps}
