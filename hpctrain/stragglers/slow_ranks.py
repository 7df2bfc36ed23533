"""Finds slow ranks from the step times of all ranks in successive windows of steps. Pure.

In synchronous training every rank's step takes as long as the slowest rank's own work, so step durations do not show
which rank is slow. A rank's own work shows which rank is slow: input, compute and other, which is everything before the
rank waits for other ranks.

A rank stands out in a window if its own work exceeds the median of the ranks by at least the largest of three limits: a
share of the step, several robust standard deviations between the ranks, and as many standard deviations of a rank from
window to window. A rank is reported as slow if it stands out in several consecutive windows. The number of windows is
chosen so that a rank is reported by chance alone once in a hundred days, at the rate at which ranks have stood out in
this run so far. The rank is no longer slow if its excess is below half of the limit in several consecutive windows.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm import describe_ranks
from hpctrain.telemetry import in_words
from hpctrain.topology import Topology

# Most lines that are printed if many ranks or nodes become slow at once; the records contain all of them.
MOST_LINES = 8


class SlowCause(Enum):
    """The probable cause of slowness. OTHER: work other than input, compute and saving, such as writing records."""

    INPUT = "input"
    COMPUTE = "compute"
    OTHER = "other"
    CHECKPOINT = "checkpoint"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Slow ranks of one node, or slow links between nodes.

    ranks: the slow ranks; for the network, all ranks on `nodes`.
    nodes: names of the nodes. For the network, one node: the link of this node to the other nodes; two nodes: the link
    between the two; more nodes: the links of most nodes.
    cause: the probable cause.
    value: seconds per step that the cause takes on these ranks; for checkpoints, seconds per save; for the network,
    bytes per second.
    usual: the usual value: the median of the ranks; for the network, the median of the nodes or, if `before`, the
    value earlier in the run.
    wait_s: seconds per step that the other ranks wait; 0 if unknown.
    before: True if `usual` was measured earlier in the run.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    cause: SlowCause
    value: float
    usual: float
    wait_s: float = 0.0
    before: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], SlowCause]:
        return self.ranks, self.cause

    def describe(self, *, over: str) -> str:
        """Returns the line for the user.

        over: text that names the steps or saves that were compared, such as `the last 200 steps`.
        """
        if self.cause is SlowCause.NETWORK:
            usual = "it was" if self.before else "the median of the nodes is"
            found = (
                f"{_rate(self.value)} between {self._ends()}, {usual} {_rate(self.usual)}; all ranks wait "
                f"{_time(self.wait_s)} per step for communication"
            )
        else:
            what = "save" if self.cause is SlowCause.CHECKPOINT else "step"
            found = (
                f"{_time(self.value)} per {what}, the median of the ranks is {_time(self.usual)}, over {over}"
            )
            if self.wait_s:
                found += f"; the others wait {_time(self.wait_s)} per step for {_pronoun(self)}"
        return f"{self._who()} {_is(self)} slow ({self.cause.value}): {found}"

    def describe_end(self) -> str:
        return f"{self._who()} {_is(self)} no longer slow ({self.cause.value})"

    def _who(self) -> str:
        nodes = ", ".join(self.nodes) if len(self.nodes) <= 2 else f"{len(self.nodes)} nodes"
        return f"{describe_ranks(self.ranks)} ({nodes})"

    def _ends(self) -> str:
        if len(self.nodes) == 1:
            return f"{self.nodes[0]} and the other nodes"
        return " and ".join(self.nodes) if len(self.nodes) == 2 else "the nodes"


@dataclass(frozen=True, slots=True)
class Change:
    """A change: something has become slow or, if `ended`, is no longer slow."""

    slow: Slow
    ended: bool = False


def lines_of(changes: Sequence[Change], *, over: str) -> list[str]:
    """Returns the lines for the user: one per change, at most MOST_LINES, and a line that counts the other changes."""
    lines = [c.slow.describe_end() if c.ended else c.slow.describe(over=over) for c in changes[:MOST_LINES]]
    if len(changes) > MOST_LINES:
        lines.append(f"{len(changes) - MOST_LINES} more of such changes are in the records only")
    return lines


def _is(slow: Slow) -> str:
    return "is" if len(slow.ranks) == 1 else "are"


def _pronoun(slow: Slow) -> str:
    return "it" if len(slow.ranks) == 1 else "them"


def _time(seconds: float) -> str:
    return in_words(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


# The numbers of a window. Seconds per step: input is waiting for data; compute is forward, backward and optimizer, in a
# pipeline with waits for other stages, so that stages of different lengths are not taken for slow ranks; other is the
# rest; exposed_sync is waiting for communication; step is the whole step without an evaluation. Then samples is the
# rank's samples per step, and save the seconds of writing its part of a checkpoint.
COLUMNS = ("input", "compute", "other", "exposed_sync", "step", "samples", "save")
INPUT, COMPUTE, OTHER, EXPOSED, STEP, SAMPLES, SAVE = range(len(COLUMNS))
NUM_OWN = 3  # columns of the rank's own work per step: input, compute, other
NUM_PARTS = 5
_NUM_PER_STEP = SAVE


@final
class WindowTimes:
    """Collects the times of this rank's steps in a window, until `take` is called.

    A time of the window is computed as the median of the means over NUM_PARTS successive parts of the window (median of
    means: Lugosi and Mendelson 2019, arXiv:1906.04280). So one or two slow steps have no effect, but waits for data in
    every tenth step do.
    """

    def __init__(self) -> None:
        self._steps = array("d")
        self._saves: list[float] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps) // _NUM_PER_STEP

    def add(self, seconds: Mapping[str, float], *, samples: int) -> None:
        """Adds a step.

        seconds: the seconds of the step by name, from `StepClock.lap`.
        samples: number of this rank's samples in the step.
        """
        step = seconds["step"] - seconds["evaluation"]
        own = (seconds["input"], seconds["compute"] + seconds.get("bubble", 0.0), seconds["other"])
        self._steps.extend((*own, seconds["exposed_sync"], step, samples))
        if "own_write" in seconds:
            self._saves.append(seconds["own_write"])

    def take(self) -> NDArray[np.float32]:
        """Returns this rank's times in the window and its samples per step, and starts the next window.

        The result has the shape (len(COLUMNS),); COLUMNS has the names of the numbers. At least one step must have been
        added.
        """
        steps = np.array(self._steps, dtype=np.float64).reshape(-1, _NUM_PER_STEP)
        parts = np.array_split(steps, min(NUM_PARTS, len(steps)))
        numbers = np.full(len(COLUMNS), np.nan, dtype=np.float32)
        # The first call of np.median would import numpy.ma, on every rank in the middle of training (0.8 MB).
        numbers[:_NUM_PER_STEP] = np.quantile([part.mean(axis=0) for part in parts], 0.5, axis=0)
        numbers[SAMPLES] = steps[:, SAMPLES].mean()
        if self._saves:
            numbers[SAVE] = sum(self._saves) / len(self._saves)
        self._steps = array("d")
        self._saves.clear()
        return numbers


# Which ranks are slow, from the numbers of all ranks in successive windows.


Numbers = NDArray[np.float64]

CAUSES = {INPUT: SlowCause.INPUT, COMPUTE: SlowCause.COMPUTE, OTHER: SlowCause.OTHER}
DEVIATIONS = 3.0
# The median of absolute deviations of a normal distribution is its standard deviation divided by this.
MAD_FACTOR = 1.4826
# Smaller differences are not worth a message, however short the steps are.
LEAST_EXCESS_S = 2e-3
_WINDOWS_REMEMBERED = 12
# The rate at which windows stand out is that of the last hour; at first it counts as one in twenty.
_WINDOWS_COUNTED = 360
_PRIOR = 0.05
_PRIOR_WEIGHT = 4.0
_WINDOWS_PER_DAY = 8640
_SAVES_PER_DAY = 150
_FALSE_PER_DAY = 0.01
# Saves are rare, and compared one by one.
SAVES_IN_A_ROW = 2
SAVE_EXCESS = 0.5  # share of the median
LEAST_SAVE_EXCESS_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankLimits:
    """Limits for reporting ranks as slow.

    min_excess: smallest excess of a rank's own work over the median of the ranks, as a fraction of the step.
    windows: smallest number of consecutive windows in which a rank must stand out.
    """

    min_excess: float = 0.1
    windows: int = 3


def lower_median(values: Numbers) -> Numbers:
    """Returns the median along the first axis; for an even number of values, the lower of the two middle values.

    So with two ranks, the time of the faster rank is the usual time.
    """
    middle: Numbers = np.partition(values, (len(values) - 1) // 2, axis=0)[(len(values) - 1) // 2]
    return middle


def own_work(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Returns each rank's own work per step, and the usual own work, both in seconds, shape (ranks, NUM_OWN).

    The usual own work is the median of the ranks. For a rank with more samples than the median, the usual time of
    computation is larger in proportion.

    numbers: results of `WindowTimes.take` of all ranks, shape (ranks, len(COLUMNS)).
    """
    own = numbers[:, :NUM_OWN]
    samples = numbers[:, SAMPLES]
    share = np.ones_like(own)
    share[:, COMPUTE] = np.maximum(1.0, samples / max(float(lower_median(samples)), 1e-9))
    return own, share * lower_median(own / share)


def deviations_for(num_ranks: int) -> float:
    """Returns how many standard deviations are significant: the largest of n normal numbers is about sqrt(2 ln n)."""
    return max(DEVIATIONS, math.sqrt(2 * math.log(max(num_ranks, 2))))


def streak_needed(*, num_out: int, num_seen: int, num_ranks: int, per_day: float) -> int:
    """Returns the number of consecutive windows in which a rank must stand out to be reported as slow.

    The number is large enough that chance alone hardly ever reports a rank. Each window counts once per rank. The
    probability that a rank stands out in a window by chance is estimated from the counts, to which a few windows are
    added of which one in twenty stood out. A streak of k windows has the k-th power of this probability.

    num_out: number of windows in which a rank stood out by chance, added up over the ranks.
    num_seen: number of all windows, added up over the ranks.
    per_day: number of windows per day.
    """
    probability = (num_out + _PRIOR * _PRIOR_WEIGHT) / (num_seen + _PRIOR_WEIGHT)
    return math.ceil(math.log(num_ranks * per_day / _FALSE_PER_DAY) / -math.log(min(probability, 0.9)))


@final
class _Streaks:
    """Counts, for each rank, the consecutive windows in which it stands out, and those in which it clearly does not.

    It stands out if its excess reaches the limit. It clearly does not if its excess is below half of the limit.
    """

    def __init__(self, *, num_ranks: int, least: int, per_day: float) -> None:
        self._least = least
        self._per_day = per_day
        self._over: NDArray[np.int64] = np.zeros(num_ranks, dtype=np.int64)
        self._under: NDArray[np.int64] = np.zeros(num_ranks, dtype=np.int64)
        self._num_out: deque[int] = deque(
            maxlen=_WINDOWS_COUNTED
        )  # ranks that stood out, without those named
        self.named: NDArray[np.bool_] = np.zeros(num_ranks, dtype=bool)

    def update(self, excess: Numbers, *, limit: float) -> tuple[list[int], list[int]]:
        """Adds a window. Returns the ranks that have become slow, and the ranks that are no longer slow.

        excess: excess of each rank over the usual value, shape (ranks,).
        limit: excess from which a rank stands out.
        """
        over = excess >= limit
        self._over = np.where(over, self._over + 1, 0)
        self._under = np.where(excess < limit / 2, self._under + 1, 0)
        self._num_out.append(int((over & ~self.named).sum()))
        # Streaks that still go on may have a cause.
        in_streaks = int(np.minimum(self._over[~self.named], _WINDOWS_COUNTED).sum())
        needed = streak_needed(
            num_out=max(0, sum(self._num_out) - in_streaks),
            num_seen=len(over) * len(self._num_out) - in_streaks,
            num_ranks=len(over),
            per_day=self._per_day,
        )
        begin = ~self.named & (self._over >= max(self._least, needed))
        for length in self._over[begin].tolist():  # these windows had a cause
            for place in range(1, min(length, len(self._num_out)) + 1):
                self._num_out[-place] -= 1
        end = self.named & (self._under >= self._least)
        self.named = (self.named | begin) & ~end
        return np.flatnonzero(begin).tolist(), np.flatnonzero(end).tolist()


@final
class SlowRanks:
    """Finds slow ranks: reports when ranks become slow, and when they are no longer slow."""

    def __init__(self, topology: Topology, *, limits: SlowRankLimits = SlowRankLimits()) -> None:
        num = topology.num_ranks
        self._topology = topology
        self._limits = limits
        self._deviations = deviations_for(num)
        self._steps = _Streaks(num_ranks=num, least=limits.windows, per_day=_WINDOWS_PER_DAY)
        self._saves = _Streaks(
            num_ranks=num, least=min(limits.windows, SAVES_IN_A_ROW), per_day=_SAVES_PER_DAY
        )
        self._recent: deque[tuple[Numbers, Numbers]] = deque(maxlen=limits.windows)  # own work, usual
        self._apart: Numbers | None = (
            None  # own work without the mean of the other ranks, in the window before
        )
        self._changes: deque[Numbers] = deque(maxlen=_WINDOWS_REMEMBERED)
        self._named: dict[tuple[tuple[int, ...], SlowCause], Slow] = {}
        self._turned: dict[
            tuple[tuple[int, ...], SlowCause], int
        ] = {}  # windows in a row that show another cause

    @property
    def named(self) -> list[Slow]:
        """The ranks that are slow now, each with the cause."""
        return list(self._named.values())

    def observe(self, numbers: Numbers) -> list[Change]:
        """Takes the times of all ranks in a window. Returns the changes: ranks that have become slow or have recovered.

        numbers: results of `WindowTimes.take` of all ranks, shape (ranks, len(COLUMNS)).
        """
        numbers = numbers.astype(np.float64)
        changes = self._observe_steps(numbers)
        if not np.isnan(numbers[:, SAVE]).any():
            changes += self._observe_saves(numbers[:, SAVE])
        return changes

    def _observe_steps(self, numbers: Numbers) -> list[Change]:
        own, usual = own_work(numbers)
        self._recent.append((own, usual))
        excess = (own - usual).sum(axis=1)
        # The excess itself is not used: it is 0 for the usual rank, and with two ranks one is always the usual one.
        apart = (excess - excess.mean()) * len(excess) / max(1, len(excess) - 1)
        if self._apart is not None:
            self._changes.append(np.abs(apart - self._apart))
        self._apart = apart
        limit = max(
            self._limits.min_excess * float(lower_median(numbers[:, STEP])),
            self._deviations * max(_spread(excess), self._variation()),
            LEAST_EXCESS_S,
        )
        began, ended = self._steps.update(excess, limit=limit)
        changes = self._ended(ended, causes=CAUSES.values())
        column_of = np.mean([a - b for a, b in self._recent], axis=0).argmax(axis=1)
        for (_, column), ranks in self._by_node(began, kinds=column_of):
            changes.append(self._began(ranks, column=column))
        return changes + self._turns(excess >= limit, column_of=(own - usual).argmax(axis=1))

    def _turns(self, over: NDArray[np.bool_], *, column_of: NDArray[np.int64]) -> list[Change]:
        """Replaces the cause of ranks that are still slow, if several consecutive windows show another cause.

        over: for each rank, True if it stands out in this window.
        column_of: for each rank, the column of its largest excess.
        """
        changes = []
        for key, slow in list(self._named.items()):
            if slow.cause is SlowCause.CHECKPOINT:
                continue
            shown = {int(column_of[rank]) for rank in slow.ranks if over[rank]}
            turned = len(shown) == 1 and CAUSES[min(shown)] is not slow.cause
            self._turned[key] = self._turned.get(key, 0) + 1 if turned else 0
            if self._turned[key] >= self._limits.windows:
                self._forget(key)
                changes += [Change(slow, ended=True), self._began(slow.ranks, column=min(shown))]
        return changes

    def _observe_saves(self, seconds: Numbers) -> list[Change]:
        usual = float(lower_median(seconds))
        excess = seconds - usual
        limit = max(SAVE_EXCESS * usual, self._deviations * _spread(excess), LEAST_SAVE_EXCESS_S)
        began, ended = self._saves.update(excess, limit=limit)
        changes = self._ended(ended, causes=[SlowCause.CHECKPOINT])
        for _, ranks in self._by_node(began, kinds=np.zeros(len(seconds), dtype=np.int64)):
            slow = Slow(
                ranks=ranks, nodes=self._nodes_of(ranks), cause=SlowCause.CHECKPOINT,
                value=float(seconds[list(ranks)].mean()), usual=usual,
            )  # fmt: skip
            self._named[slow.key] = slow
            changes.append(Change(slow))
        return changes

    def _variation(self) -> float:
        """Returns the standard deviation of a rank's excess from window to window."""
        if not self._changes:
            return 0.0
        # The difference of two numbers varies sqrt(2) times as much as one.
        return MAD_FACTOR / math.sqrt(2) * float(np.quantile(np.concatenate(self._changes), 0.5))

    def _by_node(
        self, ranks: list[int], *, kinds: NDArray[np.int64]
    ) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
        """Groups `ranks` by node and kind, such as the column of the cause. Returns pairs ((node, kind), ranks).

        kinds: kind of each rank of the run.
        """
        groups: dict[tuple[int, int], tuple[int, ...]] = {}
        for rank in ranks:
            key = (self._topology.node_of(rank), int(kinds[rank]))
            groups[key] = (*groups.get(key, ()), rank)
        return list(groups.items())

    def _nodes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return (self._topology.node_names[self._topology.node_of(ranks[0])],)

    def _began(self, ranks: tuple[int, ...], *, column: int) -> Change:
        """Records that ranks have become slow, with times that are means over the last windows.

        column: column of the cause.
        """
        own, usual = (np.mean([pair[k][list(ranks)] for pair in self._recent], axis=0) for k in (0, 1))
        slow = Slow(
            ranks=ranks, nodes=self._nodes_of(ranks), cause=CAUSES[column], value=float(own[:, column].mean()),
            usual=float(usual[:, column].mean()), wait_s=float((own - usual).sum(axis=1).max()),
        )  # fmt: skip
        self._named[slow.key] = slow
        return Change(slow)

    def _forget(self, key: tuple[tuple[int, ...], SlowCause]) -> None:
        del self._named[key]
        self._turned.pop(key, None)

    def _ended(self, ranks: list[int], *, causes: Iterable[SlowCause]) -> list[Change]:
        """Returns one change per reported group of ranks in which no rank is slow any longer, and removes these groups.

        ranks: ranks that are no longer slow.
        causes: only groups with these causes are removed.
        """
        if not ranks:
            return []
        changes = []
        causes = set(causes)
        for key, slow in list(self._named.items()):
            streaks = self._saves if slow.cause is SlowCause.CHECKPOINT else self._steps
            if slow.cause in causes and not streaks.named[list(slow.ranks)].any():
                self._forget(key)
                changes.append(Change(slow, ended=True))
        return changes


def _spread(values: Numbers) -> float:
    """Returns the standard deviation between ranks, estimated from the median of absolute deviations."""
    return MAD_FACTOR * float(lower_median(np.abs(values - lower_median(values))))
