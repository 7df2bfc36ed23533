"""Decides which causes make a result depend on how the samples are divided over ranks and micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.run.experiments.causes.findings import Cause, Finding, in_percent_or_power, seen
from hpctrain.run.experiments.causes.observations import Observations
from hpctrain.run.experiments.measuring.probes import MEAN, MIXED, SUM, WEIGHTED, WHOLE, LossFacts

_A_BATCH_AND_ITS_THIRDS = "a batch and its thirds"


def division_findings(seen_: Observations) -> Iterator[Finding]:
    """Causes that make the result depend on how the samples are divided."""
    by_ranks = not seen_.ranks.equal and seen_.ranks.failure is None
    by_parts = seen_.micro is not None and not seen_.micro.equal
    loss = seen_.loss
    is_measured = seen_.again.equal and not (seen_.draws_left and loss is not None and loss.mixes is None)
    if (by_ranks or by_parts) and loss is not None and is_measured:
        evidence = [
            *seen(seen_.ranks_against_one, seen_.ranks),
            *seen("1 rank, in 2 micro-batches", seen_.micro),
        ]
        if seen_.whole is not None and not seen_.ranks.equal:
            evidence += seen(f"{seen_.num_ranks} ranks that each compute all samples", seen_.whole)
        found = _of_sums(seen_, loss, evidence) or _of_the_loss(
            loss, evidence, matters=by_ranks or seen_.splits
        )
        if found is None and loss.kind == MEAN and by_ranks and _begins_with_gradients(seen_):
            found = _of_own_gradients(evidence)
        if found is not None:
            yield found
    yield from _randomness(seen_)


def _of_sums(seen_: Observations, loss: LossFacts, evidence: list[str]) -> Finding | None:
    """A sum over parts, or over ranks, that has another factor or other weights."""
    if loss.mixes is not None:
        return None
    if loss.kind == SUM:
        return accumulation(
            "the loss of a batch, or a term of it, is the sum of those of its parts, not their mean", evidence
        )
    factor = _factor(seen_)
    if factor is not None:
        what, times = factor
        return accumulation(
            f"{what}: all gradients are {times:.6g} times what they should be, with the same samples and parameters",
            evidence,
        )
    if loss.kind != MEAN and len(set(loss.part_sizes)) > 1:
        sizes = ", ".join(map(str, loss.part_sizes[:6]))
        return accumulation(
            f"the step computes a batch in parts of {sizes} samples, and its loss is not the mean over the samples",
            evidence,
        )
    return None


def _of_the_loss(loss: LossFacts, evidence: list[str], *, matters: bool) -> Finding | None:
    """A loss that is no mean over the samples. matters: whether this training divides its batches."""
    if loss.mixes is not None:
        name, kind, relative = loss.mixes
        return Finding(
            cause=Cause.BATCH_STATISTICS, is_difference=matters,
            text=f"the outputs of {name} ({kind}) for a sample depend on the other samples that are computed with it"
            + ("" if matters else ", so that micro-batches differ (this recipe has none)"),
            evidence=[
                f"{_A_BATCH_AND_ITS_THIRDS}: {name} returns other values for the same samples and inputs, by "
                f"{in_percent_or_power(relative)}",
                *evidence,
            ],
            advice="reduction.sync_batch_norm = true (session.sync_batch_norm), or GroupNorm or LayerNorm",
        )  # fmt: skip
    if loss.kind == MIXED:
        return Finding(
            cause=Cause.LOSS_WEIGHTS, is_difference=matters,
            text="the loss is a sum of means over different things, such as over all samples and over those of one "
            "class",
            evidence=[
                f"{_A_BATCH_AND_ITS_THIRDS}: the loss is {in_percent_or_power(loss.off)} off the mean over the "
                "samples, but copies of some samples change it as they change a sum of two means with other weights",
                *evidence,
            ],
            advice="divide each term by what is proportional to the samples, such as the mean number over the data "
            "instead of the batch's own",
        )  # fmt: skip
    if loss.kind == WEIGHTED and loss.weights is not None:
        a, b = loss.weights
        counted = "what the task's weights count" if loss.is_weighed else "samples"
        return Finding(
            cause=Cause.LOSS_WEIGHTS, is_difference=matters,
            text=f"the loss is a mean over something other than {counted} (such as tokens that are not padding)",
            evidence=[
                f"{_A_BATCH_AND_ITS_THIRDS}: the loss is {in_percent_or_power(loss.off)} off the mean over {counted}, "
                f"but is a mean with other weights: two parts of as many samples weigh {a:.3g} and {b:.3g}",
                *evidence,
            ],
            advice="return (loss, weight) from the task's loss, or give the task weight(fields); in a loop of your "
            "own, pass the rank's share of all counted elements as weight to updater.backward",
        )  # fmt: skip
    if loss.kind == WHOLE:
        return Finding(
            cause=Cause.BATCH_STATISTICS, is_difference=matters,
            text="the loss of a batch is no mean over parts of it: it compares samples of the batch with each other, "
            "or uses statistics of them",
            evidence=[f"{_A_BATCH_AND_ITS_THIRDS}: off the mean by {in_percent_or_power(loss.off)}", *evidence],
            advice="gather what it compares from all ranks, or keep the samples of a rank and its micro-batches fixed",
        )  # fmt: skip
    return None


def _of_own_gradients(evidence: list[str]) -> Finding:
    return Finding(
        cause=Cause.GRADIENTS, is_difference=True,
        text="the loss of a batch is the mean of the losses of its parts, and yet the gradient is not: each rank "
        "changes its gradients by what depends on its own samples, before they are summed",
        evidence=evidence,
        advice="look for hooks that clip or normalise gradients, autograd functions, and detached values of the batch "
        "in the loss; use the updater's clip_norm, or change gradients in the optimizer's step, which gets their sum",
    )  # fmt: skip


def _begins_with_gradients(seen_: Observations) -> bool:
    """Whether the first thing that the division of the samples changes is a gradient of the first step."""
    if seen_.drift is not None or seen_.tampered is not None or seen_.low_precision or seen_.draws_left:
        return False
    found = [c.earliest for c in (seen_.ranks, seen_.micro) if c is not None and not c.equal]
    all_applied = seen_.ranks.applied == seen_.ranks.expected
    return all_applied and all(f is not None and f.kind == "gradient" and f.step == 1 for f in found)


def _factor(seen_: Observations) -> tuple[str, float] | None:
    """Returns by what number all gradients of the first step are off, and where; None if by no one number."""
    compared = {seen_.ranks_against_one: seen_.ranks, "1 rank, in 2 micro-batches": seen_.micro}
    for what, comparison in compared.items():
        factor = comparison.factor if comparison is not None else None
        if factor is not None and abs(factor - 1) > 1e-6:
            return what, factor
    return None


def accumulation(text: str, evidence: list[str]) -> Finding:
    """Returns the finding that parts of a step are not weighed by their samples."""
    return Finding(
        cause=Cause.ACCUMULATION, is_difference=True, text=text, evidence=evidence,
        advice="return the mean over the samples, and weigh each part by its share of the batch "
        "(updater.backward(loss, weight=...)) when gradients are accumulated",
    )  # fmt: skip


def _randomness(seen_: Observations) -> Iterator[Finding]:
    if seen_.no_dropout and not seen_.draws_left:
        yield Finding(
            cause=Cause.RANDOM, is_difference=False,
            text="dropout draws other random numbers on each rank, as it should; numbers of ranks and micro-batches "
            "were compared with dropout off",
            evidence=[f"training uses the generator of {', '.join(seen_.draws)}; without dropout none"],
        )  # fmt: skip
    if not seen_.draws_left or seen_.reseeded is None or seen_.reseeded.equal:
        return
    if seen_.samples.content_changes or seen_.samples.content_unstable:
        return  # the data draw
    differ = (seen_.drift is None and not seen_.ranks.equal) or (
        seen_.micro is not None and not seen_.micro.equal
    )
    yield Finding(
        cause=Cause.RANDOM, is_difference=differ,
        text=f"training draws random numbers ({', '.join(seen_.draws_left)}) that are not dropout's, and each rank "
        "draws its own: runs on other numbers of ranks differ by them",
        evidence=[
            *seen("1 rank with other random numbers", seen_.reseeded),
            *seen(seen_.ranks_against_one, seen_.ranks),
        ],
        advice="if that is meant, compare runs statistically; else derive them from the sample's number, not from the "
        "rank",
    )  # fmt: skip
