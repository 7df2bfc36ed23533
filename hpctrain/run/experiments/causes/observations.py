"""The results of the experiments, as values from which the causes are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.run.experiments.measuring.probes import EvaluationFacts, LossFacts, LowPrecision
from hpctrain.run.experiments.measuring.samples import SampleFacts
from hpctrain.run.experiments.measuring.trace import Residual, TrialComparison

EQUAL = TrialComparison(first={}, worst=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """The first difference between the ranks of one trial, in a value that all ranks should share.

    A trial is one run of the checked training, for a few steps, under chosen conditions.

    Attributes:
        step: The step, from 1; 0: while the trial's model and optimizer were built.
        phase: When the difference appeared. `built`: while the trial's model and optimizer were built. `forward`: in a
            parameter, between the end of the step before and the call of the optimizer. `gradient`: in a gradient after
            the sum over the ranks. `option`: in an option of the optimizer. `optimizer`: in a parameter, in the
            optimizer's step. `scheduler`: in a learning rate scheduler after the last step.
        name: The name of the tensor or option, or the path of the scheduler's value.
        ranks: The ranks that differ from rank 0.
        values: The option or the scheduler's value on rank 0 and on the first of `ranks`; None for a tensor.
    """

    step: int
    phase: str
    name: str
    ranks: Sequence[int]
    values: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumptions:
    """Comparisons of three runs that were stopped and resumed, each with the run that was not stopped.

    Attributes:
        plain: The comparison of a run that was resumed from the checkpoint alone.
        with_generators: The comparison of a run that also got the user's own generators from the stopped run; None if
            not made.
        with_state: The comparison of a run that also got all other values of the user that a checkpoint lacks; None if
            not made.
    """

    plain: TrialComparison = EQUAL
    with_generators: TrialComparison | None = None
    with_state: TrialComparison | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """The results of experiments with `steps` steps on one rank and on `num_ranks`.

    A result that is missing is None or empty.

    Comparisons. Each is with the unchanged run on the same number of ranks, unless the text says otherwise:

    - again: one rank, repeated.
    - micro: one rank, two micro-batches.
    - resumed: one rank, stopped and resumed.
    - ranks: N ranks against one rank.
    - ranks_again: N ranks, repeated with different delays on each rank.
    - ranks_micro: N ranks, two micro-batches.
    - ranks_resumed: N ranks, stopped and resumed.
    - whole: N ranks that each compute all samples, against one rank.
    - reseeded: one rank, other random numbers.
    - no_dropout: True if `micro`, `ranks`, `ranks_micro` and `whole` were compared with dropout off.

    Random numbers and the user's own state:

    - draws, draws_left: the random number generators that training uses with dropout, and those that training uses
      without dropout.
    - own_generators: the paths of the user's own generators that changed during the run.
    - own_draws_matter: whether training differs if the generators in `own_generators` draw other numbers, although the
      resumed run was equal.
    - fresh_generators: the paths of the user's own generators whose state at the start differs between two runs.
    - own_state: the kinds of the user's other values that changed and that a checkpoint lacks, by path.

    Other facts:

    - buffers_apart: the buffers that differ between ranks after the first step.
    - evaluation_apart: the metrics that differ between one rank and N ranks.
    - drift, schedules_apart: the first difference between ranks, and the first difference between ranks in a learning
      rate scheduler.
    - tampered: the first step in which the optimizer's gradients are not a multiple of the sum of the gradients that
      backward computed, and by how much.
    - poisoned: what is not finite after a batch with NaN was skipped.
    - not_finite: what was first not finite in a run, as text; [] if all was finite.
    - no_gradients: whether all gradients were 0 in every step on one rank.
    - splits: whether the user's run itself uses micro-batches.
    - refused: class and text of the error that already ends the run on one rank, in step `refused_step`.
    - is_split: whether each rank holds only a part of the model.
    - repeats_intended: whether samples are drawn with replacement.
    """

    num_ranks: int
    steps: int
    tolerance: float
    double: bool
    asks_double: bool
    again: TrialComparison = EQUAL
    micro: TrialComparison | None = None
    resumed: Resumptions | None = None
    ranks: TrialComparison = EQUAL
    ranks_again: TrialComparison = EQUAL
    ranks_micro: TrialComparison | None = None
    ranks_resumed: TrialComparison | None = None
    whole: TrialComparison | None = None
    reseeded: TrialComparison | None = None
    no_dropout: bool = False
    draws: Sequence[str] = ()
    draws_left: Sequence[str] = ()
    own_generators: Sequence[str] = ()
    own_draws_matter: bool = False
    fresh_generators: Sequence[str] = ()
    own_state: Mapping[str, str] = field(default_factory=dict)
    buffers_apart: Sequence[str] = ()
    samples: SampleFacts = field(default_factory=SampleFacts)
    loss: LossFacts | None = None
    low_precision: Sequence[LowPrecision] = ()
    evaluation: EvaluationFacts | None = None
    evaluation_apart: Mapping[str, float] = field(default_factory=dict)
    drift: Drift | None = None
    schedules_apart: Drift | None = None
    tampered: tuple[int, Residual] | None = None
    poisoned: Sequence[str] = ()
    not_finite: Sequence[str] = ()
    no_gradients: bool = False
    refused: str | None = None
    refused_step: int = 0
    splits: bool = False
    is_split: bool = False
    repeats_intended: bool = False

    @property
    def ranks_against_one(self) -> str:
        return f"{self.num_ranks} ranks against 1 rank"

    @property
    def is_idle(self) -> bool:
        """True if no run applied a step."""
        found = [comparison for comparison in self.compared().values() if comparison.steps]
        return bool(found) and not any(comparison.applied or comparison.expected for comparison in found)

    def compared(self) -> dict[str, TrialComparison]:
        """Returns the comparisons that were made. The key of a comparison is a text that says what was compared."""
        ranks = f"{self.num_ranks} ranks"
        resumed = self.resumed.plain if self.resumed is not None else None
        if self.refused is not None:
            return {}
        found = {
            "1 rank, repeated": self.again,
            "1 rank, in 2 micro-batches": self.micro,
            "1 rank, stopped and resumed": resumed,
            f"{ranks} against 1 rank": self.ranks,
            f"{ranks}, repeated with delays": self.ranks_again,
            f"{ranks}, in 2 micro-batches": self.ranks_micro,
            f"{ranks}, stopped and resumed": self.ranks_resumed,
        }
        return {name: comparison for name, comparison in found.items() if comparison is not None}


# Finds where the ranks of one trial start to differ in values that all should share. Pure.


def find_drift(by_rank: Sequence[Mapping[str, Any]]) -> Drift | None:
    """Returns the first difference between the ranks; None if the ranks are equal.

    by_rank: the hashes of each rank. `initial` has the hashes of the parameters by name. Each entry of `steps` has, by
    name, the hashes of the parameters when the optimizer was called (`before`), of the `gradients`, and of the
    parameters after the step (`after`); and the optimizer's `options`. Steps that some ranks lack are ignored.
    """
    found = _apart([rank["initial"] for rank in by_rank])
    if found is not None:
        return Drift(step=0, phase="built", name=found[0], ranks=found[1])
    for number in range(min(len(rank["steps"]) for rank in by_rank)):
        steps = [rank["steps"][number] for rank in by_rank]
        for phase, key in (
            ("forward", "before"),
            ("option", "options"),
            ("gradient", "gradients"),
            ("optimizer", "after"),
        ):
            values = [step[key] for step in steps]
            if any(value is None for value in values):
                continue
            if key == "options":
                option = _option_apart(values)
                if option is not None:
                    return Drift(
                        step=number + 1, phase=phase, name=option[0], ranks=option[1], values=option[2]
                    )
                continue
            found = _apart(values)
            if found is not None:
                where = phase if all(step["before"] is not None for step in steps) else "forward"
                return Drift(step=number + 1, phase=where, name=found[0], ranks=found[1])
    return None


def schedulers_apart(by_rank: Sequence[Mapping[str, str]], *, step: int) -> Drift | None:
    """Returns the first value of a learning rate scheduler that differs between ranks; None if all values are equal.

    by_rank: the values of each rank after `step` steps, as text by path.
    """
    for path, of_rank_0 in by_rank[0].items():
        ranks = [rank for rank, values in enumerate(by_rank) if values.get(path, of_rank_0) != of_rank_0]
        if ranks:
            values = (of_rank_0, by_rank[ranks[0]][path])
            return Drift(step=step, phase="scheduler", name=path, ranks=ranks, values=values)
    return None


def _apart(values: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    for name, of_rank_0 in values[0].items():
        ranks = [rank for rank, value in enumerate(values) if value.get(name, of_rank_0) != of_rank_0]
        if ranks:
            return name, ranks
    return None


def _option_apart(
    values: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[str, list[int], tuple[str, str]] | None:
    for number, group in enumerate(values[0]):
        for name, of_rank_0 in group.items():
            found = [value[number].get(name) if number < len(value) else None for value in values]
            ranks = [rank for rank, value in enumerate(found) if value != of_rank_0]
            if ranks:
                return name, ranks, (str(of_rank_0), str(found[ranks[0]]))
    return None
