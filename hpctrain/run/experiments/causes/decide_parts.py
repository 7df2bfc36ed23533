"""Decides which causes in the data, in the division of samples and in a resumed run explain the differences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.run.experiments.causes.findings import Cause, LikelyCause, in_percent_or_power, seen
from hpctrain.run.experiments.causes.observations import Observations
from hpctrain.run.experiments.measuring.probes import MEAN, MIXED, SUM, WEIGHTED, WHOLE, LossFacts
from hpctrain.run.experiments.measuring.samples import SampleFacts

# Decides which causes in the data explain the differences. Pure.


def data_findings(observed: Observations) -> Iterator[LikelyCause]:
    samples, ranks = observed.samples, observed.num_ranks
    if samples.content_changes or samples.order_changes:
        yield _own_random(observed)
        return  # other causes cannot be decided while the data change at random
    differs = (
        samples.content_by_rank
        or samples.content_by_share
        or samples.other_steps
        or not _resumes_equal(observed)
    )
    if samples.content_unstable and differs:
        yield _own_random(observed)
        if not samples.is_numbered:
            return  # samples are known by their content
    elif samples.content_by_rank:
        yield LikelyCause(
            cause=Cause.DATA_BY_RANK, is_difference=True,
            text="the ranks read different contents for the same samples, such as "
                f"{list(samples.content_by_rank)[:3]}",
            evidence=["each rank read the same batches by itself, without the other ranks"],
            advice="let a dataset or transform depend on the sample's number and the epoch, not on the rank",
        )  # fmt: skip
    elif samples.content_by_share:
        shown = f" such as {list(samples.content_by_share)[:3]}" if samples.is_numbered else ""
        yield LikelyCause(
            cause=Cause.DATA_BY_RANK, is_difference=True,
            text=f"samples{shown} have different contents on {ranks} ranks than in one process: it depends on the "
                "rank, or on which samples are read together",
            evidence=["one process reads the same contents each time"],
            advice="let a dataset or transform depend on the sample's number and the epoch only",
        )  # fmt: skip
    yield from _repeats(observed)
    if samples.history:
        yield LikelyCause(
            cause=Cause.DATA_ORDER, is_difference=True,
            text="an epoch's samples depend on what was read before it: they differ between an epoch that is read "
                "first and one that follows an epoch left early",
            evidence=["epoch 1 of a new loader against epoch 1 after two batches of epoch 0"],
            advice="derive the order from epoch and seed alone (set_epoch must reach the workers), and end an epoch "
                "that is left",
        )  # fmt: skip
    if samples.same_every_epoch:
        yield LikelyCause(
            cause=Cause.DATA_ORDER, is_difference=True,
            text="epochs 0 and 1 have the same shuffled order: the sampler ignores the epoch",
            evidence=["the samples of both epochs, in order"],
            advice="call sampler.set_epoch(epoch), or derive the order from seed and epoch",
        )  # fmt: skip
    is_known = samples.content_by_rank or samples.content_by_share or samples.repeated
    if samples.other_steps and not is_known:
        counts = f": {samples.num_rank_rows} samples on all ranks, {samples.num_rows} in one process"
        yield LikelyCause(
            cause=Cause.DATA_ORDER, is_difference=True,
            text=f"in step {samples.other_steps} all ranks together get different samples from one process"
            + (counts if samples.num_rank_rows != samples.num_rows else ""),
            evidence=seen(f"{ranks} ranks against 1 rank", observed.ranks),
            advice="split each global batch over the ranks: batch size = global batch / number of ranks, and the "
            "same order "
            "on all ranks",
        )  # fmt: skip


def _resumes_equal(observed: Observations) -> bool:
    return observed.resumed is None or observed.resumed.plain.equal


def _own_random(observed: Observations) -> LikelyCause:
    """Returns the finding that content or order of samples depends on a random generator that the run does not seed."""
    samples = observed.samples
    found = list(samples.content_changes or samples.content_unstable)[:3]
    shown = f", such as {found}," if found and samples.is_numbered else ""
    own = [*observed.fresh_generators, *observed.own_generators]
    if samples.content_changes:
        text = f"one process reads different contents for the same samples{shown} when it runs again with the same seed"
    elif samples.order_changes:
        text = "one process gets its samples in a different order when it runs again with the same seed"
    else:
        text = (
            f"one process reads different contents for the same samples{shown} when it reads an epoch twice"
        )
        own += [f"the process's generator of {name}" for name in samples.draws]
    of = "the sampler's order" if samples.order_changes else "what the dataset or transform does"
    why = (
        f"{of} depends on {', '.join(own[:3])}"
        if own
        else f"{of} depends on random numbers without a seed, the time or other state of its own"
    )
    return LikelyCause(
        cause=Cause.OWN_RANDOM, is_difference=True, text=f"{text}: {why}",
        advice="draw random numbers from a generator that is seeded with seed, epoch and sample number: in a transform "
            "context.generator(row), in a sampler one of seed and epoch",
    )  # fmt: skip


def _times(repeated: Mapping[str, int], samples: SampleFacts) -> str:
    """Returns text that says how often some samples are repeated; empty if the indices of the samples are not known."""
    if not samples.is_numbered:
        return ""
    return ": " + ", ".join(f"{name} ({times} times)" for name, times in list(repeated.items())[:3])


def _repeats(observed: Observations) -> Iterator[LikelyCause]:
    samples, ranks = observed.samples, observed.num_ranks
    if observed.repeats_intended:
        return
    extra = sum(times - 1 for times in samples.repeated.values())
    is_padding = 0 < extra < ranks and not samples.missing
    if samples.repeated_one and not samples.has_equal:
        shown = _times(samples.repeated_one, samples)
        yield LikelyCause(
            cause=Cause.REPEATED, is_difference=True,
            text=f"one process gets samples more than once in an epoch{shown}",
            evidence=[f"{len(samples.repeated_one)} of {samples.num_seen} samples are repeated"],
            advice="draw each sample once in an epoch, or use order = 'weighted' if repeats are meant",
        )  # fmt: skip
    elif samples.repeated and not is_padding:
        shown = _times(samples.repeated, samples)
        missing = f", and {samples.missing} samples of the epoch on none" if samples.missing else ""
        yield LikelyCause(
            cause=Cause.REPEATED, is_difference=True,
            text=f"the {ranks} ranks get the same samples{shown}{missing}",
            evidence=[f"{len(samples.repeated)} samples on more than one rank, or more often than in one process"],
            advice="give the sampler num_replicas = session.world_size and rank = session.rank",
        )  # fmt: skip
    elif is_padding:
        yield LikelyCause(
            cause=Cause.REPEATED, is_difference=False,
            text=f"the sampler repeats {extra} sample{'s' if extra > 1 else ''} so that all ranks have equally many",
            advice="metrics over such an epoch count them twice",
        )  # fmt: skip
    elif samples.repeated_one:
        yield LikelyCause(
            cause=Cause.REPEATED, is_difference=False,
            text=f"{len(samples.repeated_one)} samples have the content of others: the data hold equal samples, or the "
            "sampler repeats the same ones in each epoch",
        )  # fmt: skip


# Decides which causes make a result depend on how the samples are divided over ranks and micro-batches.
# Pure.


_A_BATCH_AND_ITS_THIRDS = "a batch and its thirds"


def division_findings(seen_: Observations) -> Iterator[LikelyCause]:
    """Yields causes that make the result depend on how samples are divided into micro-batches and over ranks."""
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


def _of_sums(seen_: Observations, loss: LossFacts, evidence: list[str]) -> LikelyCause | None:
    """Returns the finding that a sum over the parts of a batch or over ranks has a wrong factor or weights, or None."""
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


def _of_the_loss(loss: LossFacts, evidence: list[str], *, matters: bool) -> LikelyCause | None:
    """Returns the finding that the loss is not a mean over samples; None if it is such a mean.

    matters: whether runs of this training differ for this reason.
    """
    if loss.mixes is not None:
        name, kind, relative = loss.mixes
        return LikelyCause(
            cause=Cause.BATCH_STATISTICS, is_difference=matters,
            text=f"the outputs of {name} ({kind}) for a sample depend on the other samples that are computed with it"
            + ("" if matters else ", so that runs in micro-batches differ (this recipe uses none)"),
            evidence=[
                f"{_A_BATCH_AND_ITS_THIRDS}: {name} returns different values for the same samples and inputs, by "
                f"{in_percent_or_power(relative)}",
                *evidence,
            ],
            advice="reduction.sync_batch_norm = true (session.sync_batch_norm), or GroupNorm or LayerNorm",
        )  # fmt: skip
    if loss.kind == MIXED:
        return LikelyCause(
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
        return LikelyCause(
            cause=Cause.LOSS_WEIGHTS, is_difference=matters,
            text=f"the loss is a mean over something other than {counted} (such as tokens that are not padding)",
            evidence=[
                f"{_A_BATCH_AND_ITS_THIRDS}: the loss is {in_percent_or_power(loss.off)} off the mean over "
                f"{counted}, but is a mean with other weights: two parts with equally many samples have the weights "
                f"{a:.3g} and {b:.3g}",
                *evidence,
            ],
            advice="return (loss, weight) from the task's loss, or give the task weight(fields); in a loop of your "
            "own, pass the rank's share of all counted elements as weight to updater.backward",
        )  # fmt: skip
    if loss.kind == WHOLE:
        return LikelyCause(
            cause=Cause.BATCH_STATISTICS, is_difference=matters,
            text="the loss of a batch is not a mean over parts of it: it compares samples of the batch with each "
                "other, or uses statistics of them",
            evidence=[f"{_A_BATCH_AND_ITS_THIRDS}: off the mean by {in_percent_or_power(loss.off)}", *evidence],
            advice="gather from all ranks what the loss compares, or keep the samples of each rank and "
                "micro-batch fixed",
        )  # fmt: skip
    return None


def _of_own_gradients(evidence: list[str]) -> LikelyCause:
    return LikelyCause(
        cause=Cause.GRADIENTS, is_difference=True,
        text="the loss of a batch is the mean of the losses of its parts, and yet the gradient is not: each rank "
        "changes its gradients by what depends on its own samples, before they are summed",
        evidence=evidence,
        advice="look for hooks that clip or normalise gradients, autograd functions, and detached values of the batch "
        "in the loss; use the updater's clip_norm, or change gradients in the optimizer's step, which gets their sum",
    )  # fmt: skip


def _begins_with_gradients(seen_: Observations) -> bool:
    """Returns True if the first value that depends on how samples are divided is a gradient of the first step."""
    if seen_.drift is not None or seen_.tampered is not None or seen_.low_precision or seen_.draws_left:
        return False
    found = [c.earliest for c in (seen_.ranks, seen_.micro) if c is not None and not c.equal]
    all_applied = seen_.ranks.applied == seen_.ranks.expected
    return all_applied and all(f is not None and f.kind == "gradient" and f.step == 1 for f in found)


def _factor(seen_: Observations) -> tuple[str, float] | None:
    """Returns the comparison in which all gradients of the first step are multiplied by one factor, and that factor.

    The result is None if there is no such comparison.
    """
    compared = {seen_.ranks_against_one: seen_.ranks, "1 rank, in 2 micro-batches": seen_.micro}
    for what, comparison in compared.items():
        factor = comparison.factor if comparison is not None else None
        if factor is not None and abs(factor - 1) > 1e-6:
            return what, factor
    return None


def accumulation(text: str, evidence: list[str]) -> LikelyCause:
    """Returns the finding that the micro-batches of a step are not weighted by their numbers of samples."""
    return LikelyCause(
        cause=Cause.ACCUMULATION, is_difference=True, text=text, evidence=evidence,
        advice="return the mean over the samples, and weigh each part by its share of the batch "
        "(updater.backward(loss, weight=...)) when gradients are accumulated",
    )  # fmt: skip


def _randomness(seen_: Observations) -> Iterator[LikelyCause]:
    if seen_.no_dropout and not seen_.draws_left:
        yield LikelyCause(
            cause=Cause.RANDOM, is_difference=False,
            text="dropout draws different random numbers on each rank, as it should; numbers of ranks and "
                "micro-batches were compared with dropout off",
            evidence=[f"training uses the generator of {', '.join(seen_.draws)}; without dropout none"],
        )  # fmt: skip
    if not seen_.draws_left or seen_.reseeded is None or seen_.reseeded.equal:
        return
    if seen_.samples.content_changes or seen_.samples.content_unstable:
        return  # the data draw
    differ = (seen_.drift is None and not seen_.ranks.equal) or (
        seen_.micro is not None and not seen_.micro.equal
    )
    yield LikelyCause(
        cause=Cause.RANDOM, is_difference=differ,
        text=f"training draws random numbers ({', '.join(seen_.draws_left)}) for something other than dropout, and "
        "each rank draws its own numbers: runs on different numbers of ranks differ for that reason",
        evidence=[
            *seen("1 rank with other random numbers", seen_.reseeded),
            *seen(seen_.ranks_against_one, seen_.ranks),
        ],
        advice="if that is meant, compare runs statistically; else derive them from the sample's number, not from the "
        "rank",
    )  # fmt: skip


# Decides which causes explain the difference of a resumed run. Pure.


_KEPT = "keep it in a buffer of the model (register_buffer), or in a loop of your own save it in also={...}"
_DRAWN = "draw from those, or from a generator that is made of the seed and the step"
_OF_ONE_PROCESS = (Cause.NOT_DETERMINISTIC, Cause.OWN_RANDOM)


def resumption_findings(seen_: Observations, known: set[Cause]) -> Iterator[LikelyCause]:
    resumed = seen_.resumed
    if resumed is None or any(cause in known for cause in _OF_ONE_PROCESS):
        return
    evidence = seen("1 rank, stopped and resumed", resumed.plain)
    if not resumed.plain.equal:
        if resumed.with_generators is not None and resumed.with_generators.equal:
            names = ", ".join(list(seen_.own_generators)[:3])
            yield LikelyCause(
                cause=Cause.OWN_RANDOM, is_difference=True,
                text=f"the resumed run differs, and is equal once the state of {names} is carried over: "
                "checkpoints have "
                "only the generators of torch, numpy and Python",
                evidence=evidence,
                advice=_DRAWN,
            )  # fmt: skip
        elif resumed.with_state is not None and resumed.with_state.equal:
            yield _own_state(seen_, evidence)
        elif (first := resumed.plain.earliest) is not None and first.kind == "samples":
            yield LikelyCause(
                cause=Cause.DATA_ORDER, is_difference=True,
                text="the resumed run gets different samples from the run that was not stopped", evidence=evidence,
                advice="let the order be a function of seed and epoch, and begin at the saved position",
            )  # fmt: skip
        else:
            yield LikelyCause(
                cause=Cause.OWN_STATE, is_difference=True,
                text="the resumed run differs: something that training changes is not in the checkpoint, and was "
                "not found "
                "in attributes of the task, the model or the optimizer",
                evidence=evidence, advice=f"{_KEPT}, or compute it from the step",
            )  # fmt: skip
    elif seen_.own_draws_matter:
        yield LikelyCause(
            cause=Cause.OWN_RANDOM, is_difference=True,
            text=f"training draws from {', '.join(list(seen_.own_generators)[:3])}, whose state is not in the "
            "checkpoint: checkpoints have only the generators of torch, numpy and Python",
            evidence=[
                "1 rank, stopped and resumed: equal, because in these few steps both runs happened to draw the same "
                "numbers; with other numbers 1 rank differs from itself"
            ],
            advice=_DRAWN,
        )  # fmt: skip
    elif seen_.ranks_resumed is not None and not seen_.ranks_resumed.equal and seen_.buffers_apart:
        names = ", ".join(seen_.buffers_apart[:3])
        if Cause.BATCH_STATISTICS not in known:
            yield LikelyCause(
                cause=Cause.BUFFER, is_difference=True,
                text=f"buffer {names} differs between the ranks, and training reads it: a checkpoint has rank 0's only",
                evidence=seen(f"{seen_.num_ranks} ranks, stopped and resumed", seen_.ranks_resumed),
                advice="sum what it is computed from over the ranks",
            )  # fmt: skip


def _own_state(seen_: Observations, evidence: list[str]) -> LikelyCause:
    paths = {path: kind for path, kind in seen_.own_state.items() if kind != "generator"}
    names = ", ".join(list(paths)[:3])
    buffers = [path for path, kind in paths.items() if kind == "buffer"]
    in_optimizer = all(path.startswith("optimizer") for path in paths)
    return LikelyCause(
        cause=Cause.OPTIMIZER if in_optimizer else Cause.BUFFER if buffers else Cause.OWN_STATE, is_difference=True,
        text=f"the resumed run differs, and is equal once {names} is carried over: it is not in the checkpoint",
        evidence=evidence,
        advice="register it with persistent=True" if buffers else _KEPT,
    )  # fmt: skip
