"""Reads an epoch's samples without training, in one process and on all ranks, and compares the samples. Collective."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from hpctrain.comm import all_gather_json
from hpctrain.run.experiments.measuring.own_state import GeneratorWatch
from hpctrain.run.experiments.measuring.samples import SampleFacts, repeats, repeats_beyond
from hpctrain.run.experiments.measuring.trace import RunTrace
from hpctrain.run.experiments.subject import BatchRows, Trial
from hpctrain.run.experiments.trials import Trials, closable

# The number of batches of an epoch that are read; the others are assumed to be like them.
MAX_BATCHES = 64
_LEFT_AFTER = 2
_SHOWN = 5


def pass_over_samples(
    trials: Trials,
    *,
    one: RunTrace,
    again: RunTrace,
    ranks: RunTrace,
    is_shuffled: bool | None,
    resumes_equal: bool = True,
) -> SampleFacts:
    """Reads the samples of an epoch in one process and on all ranks, and returns what differs. Collective.

    Args:
        one: The record of a run in one process.
        again: The record of the same run, repeated.
        ranks: The record of the run on all ranks.
        is_shuffled: Whether epochs should have different orders; None: unknown.
        resumes_equal: Whether a resumed run on one rank equals the run that was not stopped.
    """
    world = trials.session.world
    with trials.open(on_ranks=False) as trial:
        whole, complete = _read(trial, 0, MAX_BATCHES)
        # Without indices a repeated sample looks like two equal samples, but those occur equally often in each epoch.
        repeated_one = repeats(_names(whole))
        is_ambiguous = bool(repeated_one) and whole[0].indices is None
        second, _ = _read(trial, 1, MAX_BATCHES if is_ambiguous else _LEFT_AFTER)
        has_equal = is_ambiguous and (not complete or sorted(_names(whole)) == sorted(_names(second)))
        second = second[:_LEFT_AFTER]
        has_epochs = trial.has_epochs
    history = False
    if has_epochs:
        with trials.open(on_ranks=False) as trial:
            _read(trial, 0, _LEFT_AFTER)  # left early: the next reading may continue it
            after_early_end, _ = _read(trial, 1, _LEFT_AFTER)
        with trials.open(on_ranks=False) as trial:
            fresh, _ = _read(trial, 1, _LEFT_AFTER)
        history = any(_names(rows) != _names(fresh) for rows in (after_early_end, second))
    with trials.open(on_ranks=True) as trial:
        mine, _ = _read(trial, 0, MAX_BATCHES)
    names_one = _names(whole)
    everyone = all_gather_json(
        world,
        {
            "names": _names(mine), "hashes": _hashes(mine), "alone": _hashes(whole),
            "steps": [step.rows.names() for step in ranks.steps],
        },
    )  # fmt: skip
    repeated, missing = repeats_beyond(names_one, [rank["names"] for rank in everyone])
    content_one = _content(whole)
    mine_alone = _hashes(whole)
    by_rank = {
        name
        for rank in everyone
        for name, own, other in zip(names_one, mine_alone, rank["alone"], strict=False)
        if own != other
    }
    apart = sorted({name for found in all_gather_json(world, sorted(by_rank)) for name in found})
    by_share = []
    if whole and whole[0].indices is not None:
        by_share = [
            name for rank in everyone for name, hashed in zip(rank["names"], rank["hashes"], strict=True)
            if name in content_one and content_one[name] != hashed
        ]  # fmt: skip
    elif complete:
        known = set(names_one)
        by_share = [name for rank in everyone for name in rank["names"] if name not in known]
    other_steps, counts = _other_steps(one, [rank["steps"] for rank in everyone])
    changes, unlike = _changes(one, again)
    own = OwnRandom()
    if not resumes_equal or any(
        all_gather_json(world, bool(apart or by_share or changes or unlike or other_steps))
    ):
        may_compare = complete or ((has_epochs or not is_shuffled) and not history)
        own = _own_random(trials, whole, may_compare=may_compare and not repeated_one)
    changes = sorted({name for found in all_gather_json(world, [*changes, *own.changes]) for name in found})
    unstable = sorted({name for found in all_gather_json(world, own.unstable) for name in found})
    bad: dict[str, list[int]] = {}
    for rows in whole:
        for row, field in rows.not_finite:
            bad.setdefault(field, []).append(row)
    first_epoch = _names(whole[:_LEFT_AFTER])
    return SampleFacts(
        num_seen=len(names_one), repeated_one=repeated_one, has_equal=has_equal, repeated=repeated,
        missing=missing if complete else 0,
        not_finite=bad, content_by_rank=apart[:_SHOWN], content_by_share=sorted(set(by_share))[:_SHOWN],
        content_changes=changes[:_SHOWN], content_unstable=unstable[:_SHOWN],
        order_changes=any(all_gather_json(world, own.order_changes)), draws=own.draws,
        is_numbered=not whole or whole[0].indices is not None,
        other_steps=other_steps, num_rows=counts[0], num_rank_rows=counts[1],
        same_every_epoch=is_shuffled is True and len(first_epoch) > 1 and first_epoch == _names(second),
        history=history,
    )  # fmt: skip


def _read(trial: Trial, epoch: int, most: int) -> tuple[list[BatchRows], bool]:
    """Reads up to `most` batches of an epoch. Returns their samples, and whether these are all batches of the epoch."""
    found: list[BatchRows] = []
    with closing(closable(trial.batches(epoch))) as batches:
        for batch in itertools.islice(batches, most):
            found.append(trial.rows(batch))
        complete = len(found) < most or next(batches, None) is None
    return found, complete


def _names(rows: Sequence[BatchRows]) -> list[int]:
    return [name for batch in rows for name in batch.names()]


def _hashes(rows: Sequence[BatchRows]) -> list[int]:
    return [hashed for batch in rows for hashed in batch.hashes]


def _content(rows: Sequence[BatchRows]) -> dict[int, int]:
    return dict(zip(_names(rows), _hashes(rows), strict=True))


def _changes(one: RunTrace, again: RunTrace) -> tuple[list[int], bool]:
    """Returns the samples whose content differs between two runs, and whether any step has other samples in one run."""
    found, unlike = [], False
    for first, second in zip(one.steps, again.steps, strict=False):
        if first.rows.names() != second.rows.names():
            unlike = True
        elif first.rows.indices is not None:
            pairs = zip(first.rows.names(), first.rows.hashes, second.rows.hashes, strict=True)
            found += [name for name, a, b in pairs if a != b]
    return sorted(set(found)), unlike


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRandom:
    """Facts about samples that change because the dataset or sampler draws random numbers of its own.

    Attributes:
        changes: Samples whose content differs between two runs of one process.
        unstable: Samples whose content differs between two readings of an epoch by one process.
        order_changes: Whether two runs of one process get the same samples in different orders.
        draws: The random number generators of the process that are used while samples are read.
    """

    changes: Sequence[int] = ()
    unstable: Sequence[int] = ()
    order_changes: bool = False
    draws: Sequence[str] = ()


def _own_random(trials: Trials, whole: Sequence[BatchRows], *, may_compare: bool) -> OwnRandom:
    """Reads epoch 0 twice in a new trial, and compares the readings with each other and with `whole`. Collective.

    whole: the samples of epoch 0 that another trial has read, by batch.
    may_compare: whether each reading of the epoch should yield the same samples, in any order. Only then can samples
    without indices in the dataset be compared.
    """
    with trials.open(on_ranks=False) as trial:
        with GeneratorWatch(trial.session.device) as watch:
            first, _ = _read(trial, 0, MAX_BATCHES)
        second, _ = _read(trial, 0, MAX_BATCHES)
        with closing(closable(trial.batches(0))) as batches:
            next(batches, None)  # a DataLoader draws a seed of its workers before it
            with GeneratorWatch(trial.session.device) as later:
                deque(itertools.islice(batches, _LEFT_AFTER), maxlen=0)
    changes = _contents_apart(whole, first, may_compare=may_compare)
    return OwnRandom(
        changes=changes, unstable=_contents_apart(first, second, may_compare=may_compare),
        order_changes=not changes and _names(whole) != _names(first), draws=sorted(later.used or watch.used),
    )  # fmt: skip


def _contents_apart(
    first: Sequence[BatchRows], second: Sequence[BatchRows], *, may_compare: bool
) -> list[int]:
    """Returns the samples whose content differs between two readings of an epoch.

    may_compare: whether both readings should yield the same samples, in any order. Only then can samples without
    indices in the dataset be compared.
    """
    if not first or not second:
        return []
    if first[0].indices is not None:
        known = _content(second)
        return [name for name, hashed in _content(first).items() if known.get(name, hashed) != hashed]
    if not may_compare:
        return []
    # A sampler may leave out other samples in each reading, less than a batch, so that all batches are full.
    left_out = max(len(rows.hashes) for rows in first) if len(first) > 1 else 0
    apart = Counter(_names(first)) - Counter(_names(second))
    return list(apart) if apart.total() > left_out else []


def _other_steps(one: RunTrace, by_rank: Sequence[Sequence[Sequence[int]]]) -> tuple[int, tuple[int, int]]:
    """Returns the first step, from 1, in which the ranks together get other samples than one process.

    Also returns the number of samples of that step in one process and on all ranks. All are 0 if there is no such step.
    """
    for number in range(min(len(one.steps), *(len(rank) for rank in by_rank))):
        alone = sorted(one.steps[number].rows.names())
        together = sorted(name for rank in by_rank for name in rank[number])
        if alone != together:
            return number + 1, (len(alone), len(together))
    return 0, (0, 0)
