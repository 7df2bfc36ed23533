"""Decides which causes explain the differences that the experiments observed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.errors import BackwardRanTwice, GradientsInUse
from hpctrain.run.experiments.causes.decide_parts import (
    accumulation,
    data_findings,
    division_findings,
    resumption_findings,
)
from hpctrain.run.experiments.causes.findings import (
    Cause,
    LikelyCause,
    describe_difference,
    in_percent_or_power,
    seen,
)
from hpctrain.run.experiments.causes.observations import Drift, Observations

_ORDER = list(Cause)
_SAME_FOR_SCHEDULERS = "give schedulers a value that is the same on all ranks, such as session.mean(loss)"
_CAUSES_OF_ERRORS = {
    GradientsInUse.__name__: Cause.GRADIENTS,
    BackwardRanTwice.__name__: Cause.ACCUMULATION,
}


def find_causes(seen_: Observations) -> list[LikelyCause]:
    """Returns the causes of the observed differences, the most probable first; [] if everything compared is equal."""
    if seen_.refused is not None:
        text = "the run ends with an error, on 1 rank already"
        return [
            LikelyCause(
                cause=cause_of_error(seen_.refused),
                is_difference=True,
                text=text,
                evidence=[f"step {seen_.refused_step}: {seen_.refused}"],
                advice="do what the message says",
            )
        ]
    found = [
        *_idle(seen_),
        *data_findings(seen_),
        *_one_process(seen_),
        *_ranks(seen_),
        *division_findings(seen_),
    ]
    if seen_.drift is None:
        found += _options(seen_)
    found += resumption_findings(seen_, {f.cause for f in found})
    found += _evaluation(seen_)
    found += _steps_left_out(seen_, found)
    found += [*_precision(seen_, found), *_poisoned(seen_)]
    found += _unexplained(seen_, found)
    unique: dict[Cause, LikelyCause] = {}
    for finding in found:
        if finding.cause not in unique or (finding.is_difference and not unique[finding.cause].is_difference):
            unique[finding.cause] = finding
    return sorted(unique.values(), key=lambda f: (not f.is_difference, f.is_potential, _ORDER.index(f.cause)))


def _idle(seen_: Observations) -> Iterator[LikelyCause]:
    """Yields a finding if no run applied a step. All runs are then equal because none of them trains."""
    if not seen_.is_idle:
        return
    steps = seen_.again.steps
    if seen_.not_finite:
        text = f"none of the {steps} steps was applied on any number of ranks, so nothing was compared: "
        yield LikelyCause(
            cause=Cause.NOT_APPLIED, is_difference=True, text=text + seen_.not_finite[0], evidence=seen_.not_finite[1:],
            advice="correct what is not finite, or train on other samples: steps whose gradients are not finite are "
                "skipped",
        )  # fmt: skip
        return
    yield LikelyCause(
        cause=Cause.NOT_APPLIED, is_difference=True,
        text=f"none of the {steps} steps was applied on any number of ranks, so nothing was compared: the optimizer "
        "was not called, though losses and gradients are finite",
        advice="call updater.step() in each step; a step whose weights sum to 0 is not applied either",
    )  # fmt: skip


def _steps_left_out(seen_: Observations, found: list[LikelyCause]) -> Iterator[LikelyCause]:
    """Yields a finding about steps that only some runs apply, or that all runs skip.

    If all runs apply all steps, yields a finding if values are not finite or all gradients are 0.
    """
    if seen_.is_idle:
        return
    for what, comparison in seen_.compared().items():
        if comparison.failure is not None or comparison.applied == comparison.expected:
            continue
        if not any(f.is_difference for f in found):
            yield LikelyCause(
                cause=Cause.NOT_FINITE, is_difference=True,
                text=f"{what}: {comparison.applied} of {comparison.steps} steps were applied, and "
                f"{comparison.expected} in the run that it is compared with",
                evidence=seen_.not_finite,
                advice="steps whose gradients are not finite are skipped: look for what is not finite in only one of "
                "the two runs",
            )  # fmt: skip
        return
    if seen_.again.applied < seen_.again.steps:
        reasons = f": {seen_.not_finite[0]}" if seen_.not_finite else ""
        text = f"{seen_.again.steps - seen_.again.applied} of {seen_.again.steps} steps were skipped, alike in all runs"
        yield LikelyCause(cause=Cause.NOT_FINITE, is_difference=False, text=text + reasons)
    elif seen_.not_finite:
        text = f"all steps were applied, though {'; '.join(seen_.not_finite)}"
        yield LikelyCause(cause=Cause.NOT_FINITE, is_difference=False, text=text)
    elif seen_.no_gradients:
        yield LikelyCause(
            cause=Cause.NOT_APPLIED, is_difference=False,
            text="all gradients are 0 in every step: the loss does not depend on the parameters, or its gradient "
            "vanishes",
        )  # fmt: skip


def _one_process(seen_: Observations) -> Iterator[LikelyCause]:
    samples = seen_.samples
    if seen_.again.equal or samples.content_changes or samples.order_changes:
        return
    evidence = seen("1 rank, the same run again", seen_.again)
    if seen_.fresh_generators:
        names = ", ".join(seen_.fresh_generators[:3])
        yield LikelyCause(
            cause=Cause.OWN_RANDOM, is_difference=True,
            text=f"two runs with the same seed differ: {names} begins each run in a different state",
            evidence=evidence,
            advice="seed it from the run's seed, or use the generators of torch, numpy or Python, which the run seeds",
        )  # fmt: skip
        return
    yield LikelyCause(
        cause=Cause.NOT_DETERMINISTIC, is_difference=True,
        text="two runs of one process with the same seed, parameters and samples differ",
        evidence=evidence,
        advice="look for what depends on time, process, memory addresses or the order of threads in this tensor's "
        "computation, such as a set's order or atomic additions",
    )  # fmt: skip


def _ranks(seen_: Observations) -> Iterator[LikelyCause]:
    """Yields causes that make ranks differ from each other, or make sums over the ranks wrong."""
    apart = not seen_.ranks.equal or not seen_.ranks_again.equal
    if seen_.tampered is not None and apart:
        step, residual = seen_.tampered
        again = (
            [] if seen_.ranks_again.equal else seen(f"{seen_.num_ranks} ranks, repeated", seen_.ranks_again)
        )
        yield LikelyCause(
            cause=Cause.GRADIENTS, is_difference=True,
            text=f"in step {step} the gradients that the optimizer gets are not proportional to the sum of those that "
                f"backward computed on the ranks: {residual.tensor} is off by "
                f"{in_percent_or_power(residual.relative)}",
            evidence=[*seen(seen_.ranks_against_one, seen_.ranks), *again],
            advice="do not change .grad between backward and step (unscaling, clipping, .data): the sum over the ranks "
            "may be going on; use the updater's clip_norm and loss_scale",
        )  # fmt: skip
    drift = seen_.drift
    if drift is not None:
        yield from _drift(seen_)
    elif seen_.schedules_apart is not None:
        yield _schedules(seen_.schedules_apart)
    failure = seen_.ranks.failure or seen_.ranks_again.failure
    if failure is not None and drift is None and seen_.tampered is None:
        yield _refused(seen_, failure)


def _drift(seen_: Observations) -> Iterator[LikelyCause]:
    drift = seen_.drift
    assert drift is not None
    ranks = ", ".join(map(str, drift.ranks[:4]))
    what = f"rank {ranks} and rank 0"
    first = "" if drift.step <= 1 else f" (equal until step {drift.step - 1})"
    evidence = [
        f"on {seen_.num_ranks} ranks, step {drift.step}{first}",
        *seen(seen_.ranks_against_one, seen_.ranks),
    ]
    if drift.phase == "option":
        values = (
            f": {drift.values[0]} on rank 0, {drift.values[1]} on rank {drift.ranks[0]}"
            if drift.values
            else ""
        )
        name = "learning rate" if drift.name == "lr" else f"option {drift.name}"
        yield LikelyCause(
            cause=Cause.LEARNING_RATE if drift.name == "lr" else Cause.OPTIMIZER, is_difference=True,
            text=f"{what} have a different {name} in step {drift.step}{values}", evidence=evidence,
            advice=_SAME_FOR_SCHEDULERS if drift.name == "lr" else "set it on all ranks alike",
        )  # fmt: skip
    elif drift.phase == "optimizer":
        yield LikelyCause(
            cause=Cause.OPTIMIZER, is_difference=True,
            text=f"{what} have the same parameters, gradients and options before the optimizer's step {drift.step}, "
                f"but a different {drift.name} after it",
            evidence=evidence,
            advice="an optimizer that draws random numbers needs a generator that is the same on all ranks",
        )  # fmt: skip
    elif drift.phase == "forward":
        yield LikelyCause(
            cause=Cause.DRIFT, is_difference=True,
            text=f"parameter {drift.name} differs between {what} when the optimizer is called in step "
            f"{drift.step}, though "
            "it was equal after the step before: forward or backward changes it",
            evidence=evidence,
            advice="do not change parameters in forward (Embedding with max_norm does): change them after the step, on "
            "all ranks alike",
        )  # fmt: skip
    elif drift.phase == "built" or seen_.tampered is None:
        where = (
            "when the training is built" if drift.phase == "built" else f"after the sum of step {drift.step}"
        )
        yield LikelyCause(
            cause=Cause.GRADIENTS if drift.phase == "gradient" else Cause.DRIFT, is_difference=True,
            text=f"{drift.phase} {drift.name} differs between {what} {where}", evidence=evidence,
            advice="compute it on all ranks alike",
        )  # fmt: skip


def _schedules(apart: Drift) -> LikelyCause:
    values = f": {apart.values[0]:.40} and {apart.values[1]:.40}" if apart.values else ""
    return LikelyCause(
        cause=Cause.LEARNING_RATE, is_difference=True,
        text=f"after {apart.step} steps the schedulers of rank 0 and rank {apart.ranks[0]} hold a different "
            f"{apart.name}{values}: sooner or later they will set different learning rates",
        advice=_SAME_FOR_SCHEDULERS,
    )  # fmt: skip


def cause_of_error(failure: str) -> Cause:
    """Returns the cause that the text of an error names; REFUSED if the text names no cause.

    failure: the name of the error's class, a colon, and the text of the error.
    """
    return _CAUSES_OF_ERRORS.get(failure.partition(":")[0], Cause.REFUSED)


def _refused(seen_: Observations, failure: str) -> LikelyCause:
    """Returns the finding about an error that only the run on several ranks raises.

    failure: the name of the error's class, a colon, and the text of the error.
    """
    evidence = (
        seen(seen_.ranks_against_one, seen_.ranks)
        if seen_.ranks.failure
        else seen("repeated", seen_.ranks_again)
    )
    return LikelyCause(
        cause=cause_of_error(failure),
        is_difference=True,
        text=f"the run on {seen_.num_ranks} ranks ends with an error that the run on 1 rank does not have",
        evidence=evidence,
        advice="do what the message says",
    )


def _options(seen_: Observations) -> Iterator[LikelyCause]:
    """Yields a finding about an optimizer option that is equal on all ranks of a run but differs between runs."""
    runs = {
        f"on {seen_.num_ranks} ranks": (seen_.ranks, "give the optimizer the same options on every number of ranks"),
        "with 2 micro-batches": (seen_.micro, "step schedulers once after each step, not after each micro-batch"),
        f"on {seen_.num_ranks} ranks with 2 micro-batches": (
            seen_.ranks_micro, "step schedulers once after each step, not after each micro-batch",
        ),
    }  # fmt: skip
    for what, (comparison, advice) in runs.items():
        option = comparison.first.get("option") if comparison is not None else None
        if option is None or (comparison is not None and comparison.earliest is not option):
            continue
        is_rate = option.tensor.startswith("lr ")
        by_parts = comparison is not seen_.ranks
        cause = Cause.ACCUMULATION if by_parts else Cause.LEARNING_RATE if is_rate else Cause.OPTIMIZER
        name = option.tensor.replace("lr ", "the learning rate ", 1) if is_rate else f"option {option.tensor}"
        yield LikelyCause(
            cause=cause, is_difference=True, text=(
                f"in step {option.step} {name} {what} differs from that of the "
                "run on 1 rank"
            ),
            evidence=seen(f"{what} against 1 rank", comparison), advice=advice,
        )  # fmt: skip
        return


def _evaluation(seen_: Observations) -> Iterator[LikelyCause]:
    facts = seen_.evaluation
    if facts is None:
        return
    telling = [entry for entry in facts.training if "Dropout" in entry[1] or "BatchNorm" in entry[1]]
    relevant = [f"{name} ({kind})" for name, kind in telling or facts.training]
    modes = [f"in training mode during evaluation: {', '.join(relevant[:4])}"] if relevant else []
    changes_anyway = seen_.drift is not None and not relevant and not facts.differs
    if (facts.differs or facts.changed) and not changes_anyway:
        evidence = [*modes]
        if facts.differs:
            name, relative = max(facts.differs.items(), key=lambda item: item[1])
            evidence.append(
                f"two evaluations of the same parameters: {name} differs by {in_percent_or_power(relative)}"
            )
        if facts.draws:
            evidence.append(f"forward in evaluation draws random numbers ({', '.join(facts.draws)})")
        if facts.changed:
            evidence.append(f"evaluation changes {', '.join(list(facts.changed)[:3])}")
        text = "evaluation computes with the model in training mode" if relevant else (
            "evaluation draws random numbers although the model is in evaluation mode (such as dropout without "
            "`training=self.training`)"
        )  # fmt: skip
        yield LikelyCause(
            cause=Cause.EVALUATION, is_difference=True, text=text, evidence=evidence,
            advice="leave the mode to the run, which calls model.eval(); pass training=self.training to "
            "functional dropout",
        )  # fmt: skip
    elif facts.modes:
        yield LikelyCause(
            cause=Cause.EVALUATION, is_difference=True,
            text=f"evaluation leaves modules in a different mode: {', '.join(list(facts.modes)[:4])}",
            advice="leave the mode to the run",
        )  # fmt: skip
    elif seen_.evaluation_apart:
        name, relative = max(seen_.evaluation_apart.items(), key=lambda item: item[1])
        yield LikelyCause(
            cause=Cause.METRICS, is_difference=True,
            text=f"metric {name} of the same parameters and samples differs between 1 rank and {seen_.num_ranks}, by "
            f"{in_percent_or_power(relative)}",
            advice="metrics are taken as means over samples, or over what the task's weight(fields) counts: for other "
            "means return (metrics, weight)",
        )  # fmt: skip


def _precision(seen_: Observations, found: list[LikelyCause]) -> Iterator[LikelyCause]:
    if not seen_.low_precision or not seen_.double:
        return
    differs = any(not c.equal for c in seen_.compared().values()) and not any(f.is_difference for f in found)
    where = [
        f"{entry.module or 'the loss'}: {entry.operation} gives {entry.dtype}"
        for entry in seen_.low_precision[:4]
    ]
    yield LikelyCause(
        cause=Cause.FLOAT32, is_difference=seen_.asks_double or differs,
        text=f"the model computes in float64, but {seen_.low_precision[0].module or 'its loss'} computes in "
        f"{seen_.low_precision[0].dtype}"
        + ("" if seen_.asks_double else ": harmless in a float32 run, but differences below 1e-7 cannot be told apart"),
        evidence=where, advice="keep the dtype of the input: x.to(weight.dtype) instead of x.float()",
    )  # fmt: skip


def _poisoned(seen_: Observations) -> Iterator[LikelyCause]:
    if seen_.samples.not_finite and not seen_.poisoned:
        fields = [
            f"field {name} of samples {list(rows)[:3]}" for name, rows in seen_.samples.not_finite.items()
        ]
        yield LikelyCause(
            cause=Cause.NOT_FINITE,
            is_difference=False,
            text=f"not finite: {'; '.join(fields)}; steps on them are skipped, or the task handles them",
        )
    if seen_.poisoned:
        bad = [
            f"field {name} is not finite in samples {list(rows)[:3]}"
            for name, rows in seen_.samples.not_finite.items()
        ]
        yield LikelyCause(
            cause=Cause.BUFFER_NOT_FINITE, is_difference=True, is_potential=not bad,
            text=f"after a batch with NaN, whose step is skipped, {', '.join(list(seen_.poisoned)[:4])} is not "
            "finite and "
            "stays so",
            evidence=bad or ["a NaN was put into one sample to see this; the data themselves have none"],
            advice="keep running statistics in buffers of the model, which the run puts back, or skip what is not "
            "finite",
        )  # fmt: skip


def _unexplained(seen_: Observations, found: list[LikelyCause]) -> Iterator[LikelyCause]:
    if any(f.is_difference for f in found):
        return
    for what, comparison in seen_.compared().items():
        first = comparison.earliest
        if comparison.equal or (first is None and comparison.failure is None):
            continue
        if "micro" in what and not seen_.splits and found:
            continue  # explained by a note
        evidence = [line for name, other in seen_.compared().items() for line in seen(name, other)]
        buffer = comparison.first.get("buffer")
        if buffer is not None and "micro" in what and seen_.ranks.equal:
            yield LikelyCause(
                cause=Cause.BUFFER, is_difference=seen_.splits,
                text=f"forward changes buffer {buffer.tensor} each time that it is called, and so more often in a step "
                "of several micro-batches" + ("" if seen_.splits else " (this recipe uses none)"),
                evidence=seen(what, comparison), advice="change it once in a step, such as after updater.step()",
            )  # fmt: skip
            if not seen_.splits:
                continue  # a note
        elif first is not None and first.kind == "buffer":
            yield LikelyCause(
                cause=Cause.BUFFER, is_difference=True,
                text=f"{what}: {describe_difference(first)}: it is computed from the samples of one rank or "
                "part", evidence=evidence,
                advice="sum what it is computed from over the ranks",
            )  # fmt: skip
        elif "micro" in what and seen_.ranks.equal:
            yield accumulation(
                f"{what}: {describe_difference(first) if first else comparison.failure}, though the loss of a batch is "
                "the mean of those of its parts: the step does something for each micro-batch that must be done once "
                "per step, such as clipping, weight decay or the optimizer's step",
                evidence,
            )
        else:
            yield LikelyCause(
                cause=Cause.UNKNOWN, is_difference=True, text=f"{what} differs, and no experiment explains it",
                evidence=evidence,
            )  # fmt: skip
        return
