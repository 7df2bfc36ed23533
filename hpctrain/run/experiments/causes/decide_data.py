"""Decides which causes in the data the differences have. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.run.experiments.causes.findings import Cause, Finding, seen
from hpctrain.run.experiments.causes.observations import Observations
from hpctrain.run.experiments.measuring.samples import SampleFacts


def data_findings(observed: Observations) -> Iterator[Finding]:
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
        yield Finding(
            cause=Cause.DATA_BY_RANK, is_difference=True,
            text=f"the ranks read other contents for the same samples, such as {list(samples.content_by_rank)[:3]}",
            evidence=["each rank read the same batches alone, as the only rank"],
            advice="let a dataset or transform depend on the sample's number and the epoch, not on the rank",
        )  # fmt: skip
    elif samples.content_by_share:
        shown = f" such as {list(samples.content_by_share)[:3]}" if samples.is_numbered else ""
        yield Finding(
            cause=Cause.DATA_BY_RANK, is_difference=True,
            text=f"samples{shown} have another content on {ranks} ranks than "
            "in one "
            "process: it depends on the rank, or on which samples are read together",
            evidence=["one process reads them alike each time"],
            advice="let a dataset or transform depend on the sample's number and the epoch only",
        )  # fmt: skip
    yield from _repeats(observed)
    if samples.history:
        yield Finding(
            cause=Cause.DATA_ORDER, is_difference=True,
            text="an epoch's samples depend on what was read before it: read first they are others than after an epoch "
            "that was left early",
            evidence=["epoch 1 of a new loader, and after two batches of epoch 0"],
            advice="make the order of epoch and seed alone (set_epoch must reach the workers), and end an epoch "
            "that is "
            "left",
        )  # fmt: skip
    if samples.same_every_epoch:
        yield Finding(
            cause=Cause.DATA_ORDER, is_difference=True,
            text="epochs 0 and 1 have the same shuffled order: the sampler ignores the epoch",
            evidence=["the samples of both epochs, in order"],
            advice="call sampler.set_epoch(epoch), or derive the order from seed and epoch",
        )  # fmt: skip
    is_known = samples.content_by_rank or samples.content_by_share or samples.repeated
    if samples.other_steps and not is_known:
        counts = f": {samples.num_rank_rows} samples on all ranks, {samples.num_rows} in one process"
        yield Finding(
            cause=Cause.DATA_ORDER, is_difference=True,
            text=f"in step {samples.other_steps} the ranks together get other samples than one process"
            + (counts if samples.num_rank_rows != samples.num_rows else ""),
            evidence=seen(f"{ranks} ranks against 1 rank", observed.ranks),
            advice="split each global batch over the ranks: batch size = global batch / number of ranks, and the "
            "same order "
            "on all ranks",
        )  # fmt: skip


def _resumes_equal(observed: Observations) -> bool:
    return observed.resumed is None or observed.resumed.plain.equal


def _own_random(observed: Observations) -> Finding:
    """Samples whose content or order is drawn from something that the run does not seed for each sample."""
    samples = observed.samples
    found = list(samples.content_changes or samples.content_unstable)[:3]
    shown = f", such as {found}," if found and samples.is_numbered else ""
    own = [*observed.fresh_generators, *observed.own_generators]
    if samples.content_changes:
        text = f"one process reads other contents for the same samples{shown} when it runs again with the same seed"
    elif samples.order_changes:
        text = "one process gets its samples in another order when it runs again with the same seed"
    else:
        text = f"one process reads other contents for the same samples{shown} when it reads an epoch twice"
        own += [f"the process's generator of {name}" for name in samples.draws]
    of = "the sampler's order" if samples.order_changes else "what the dataset or transform does"
    why = (
        f"{of} depends on {', '.join(own[:3])}"
        if own
        else f"{of} depends on random numbers without a seed, the time or other state of its own"
    )
    return Finding(
        cause=Cause.OWN_RANDOM, is_difference=True, text=f"{text}: {why}",
        advice="draw random numbers from a generator that is made of seed, epoch and sample number: in a transform "
        "context.generator(row), in a sampler one of seed and epoch",
    )  # fmt: skip


def _times(repeated: Mapping[str, int], samples: SampleFacts) -> str:
    """Says how often the first samples are repeated, if their numbers are known."""
    if not samples.is_numbered:
        return ""
    return ": " + ", ".join(f"{name} ({times} times)" for name, times in list(repeated.items())[:3])


def _repeats(observed: Observations) -> Iterator[Finding]:
    samples, ranks = observed.samples, observed.num_ranks
    if observed.repeats_intended:
        return
    extra = sum(times - 1 for times in samples.repeated.values())
    is_padding = 0 < extra < ranks and not samples.missing
    if samples.repeated_one and not samples.has_equal:
        shown = _times(samples.repeated_one, samples)
        yield Finding(
            cause=Cause.REPEATED, is_difference=True,
            text=f"one process gets samples more than once in an epoch{shown}",
            evidence=[f"{len(samples.repeated_one)} of {samples.num_seen} samples are repeated"],
            advice="draw each sample once in an epoch, or use order = 'weighted' if repeats are meant",
        )  # fmt: skip
    elif samples.repeated and not is_padding:
        shown = _times(samples.repeated, samples)
        missing = f", and {samples.missing} samples of the epoch on none" if samples.missing else ""
        yield Finding(
            cause=Cause.REPEATED, is_difference=True,
            text=f"the {ranks} ranks get the same samples{shown}{missing}",
            evidence=[f"{len(samples.repeated)} samples on more than one rank, or more often than in one process"],
            advice="give the sampler num_replicas = session.world_size and rank = session.rank",
        )  # fmt: skip
    elif is_padding:
        yield Finding(
            cause=Cause.REPEATED, is_difference=False,
            text=f"the sampler repeats {extra} sample{'s' if extra > 1 else ''} so that each rank has as many",
            advice="metrics over such an epoch count them twice",
        )  # fmt: skip
    elif samples.repeated_one:
        yield Finding(
            cause=Cause.REPEATED, is_difference=False,
            text=f"{len(samples.repeated_one)} samples have the content of others: the data hold equal samples, or the "
            "sampler repeats the same ones in each epoch",
        )  # fmt: skip
