"""Elastic runs: how many ranks an attempt has, what stays the same when their number changes, and when to change it.

An elastic run has between MIN and MAX ranks. Before each attempt the supervisor counts the slots (places for a rank) of
the nodes that are alive. During an attempt `ResizeWatch` looks for more slots, and for slots that were taken away.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, final

from hpctrain.errors import LaunchError, UsageError
from hpctrain.supervise.nodes import Allocation, Checks, nodes_now, survey_nodes, without_slurmd


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRange:
    """Smallest and largest number of ranks of an elastic run."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, *, name: str = "--elastic") -> ElasticRange:
        """Parses `MIN:MAX`. Raises UsageError for any other text. name: what the message calls the value."""
        least, colon, most = text.partition(":")
        if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
            raise UsageError(
                f"{name} {text!r} is not a range of ranks: write MIN:MAX, two numbers of at least 1, such as 2:4"
            )
        return cls(least=int(least), most=int(most))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


class BatchRule(str, Enum):
    """What stays the same if the number of ranks changes.

    FIXED: the global batch. Each rank computes its larger share in more micro-batches.
    PER_RANK: the samples per rank. The global batch changes, and the learning rate follows `optimizer.lr_scaling`.
    """

    FIXED = "fixed"
    PER_RANK = "per-rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBatch:
    """Batch of an elastic run, as the recipe describes it for the largest number of ranks.

    micro_batches: micro-batches per rank at the largest number of ranks; None if the recipe's model is a pipeline,
    whose micro-batches belong to its schedule.
    lr_scaling: rule by which the learning rate follows the global batch: `none`, `linear` or `sqrt`.
    """

    rule: BatchRule
    global_batch: int
    micro_batches: int | None
    lr_scaling: str

    def overrides(self, *, ranks: int, most: int) -> tuple[str, ...]:
        """Returns the options of `hpctrain train` that set the batch of an attempt with `ranks` ranks."""
        if self.rule is BatchRule.PER_RANK:
            return ("--set", f"data.global_batch={self.global_batch // most * ranks}")
        if self.micro_batches is None or ranks == most:
            return ()
        return ("--set", f"data.micro_batches={self.micro_batches * -(-most // ranks)}")

    def describe(self, *, ranks: int, most: int) -> str:
        """Returns a text for the user: what happens to batch and learning rate in an attempt with `ranks` ranks."""
        if self.rule is BatchRule.FIXED:
            parts = self.micro_batches and self.micro_batches * -(-most // ranks)
            in_parts = "" if parts is None else f", each rank computes its share in {parts} micro-batches"
            return f"the global batch ({self.global_batch}) and the learning rate stay{in_parts}"
        batch = self.global_batch // most * ranks
        rate = (
            "the learning rate stays (optimizer.lr_scaling = 'none')"
            if self.lr_scaling == "none"
            else f"the learning rate follows it (optimizer.lr_scaling = {self.lr_scaling!r})"
        )
        return f"{self.global_batch // most} samples per rank, so the global batch is {batch}; {rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How the number of ranks of a supervised run may change.

    range: limits of the number of ranks.
    wait_s: seconds to wait for slots if there are fewer than the range needs.
    unit: the number of ranks is a multiple of this number: the ranks that hold one copy of a split model.
    batch: None for a command other than `hpctrain train`.
    hostfile: file with the slots of this machine, which is read again while the run continues; None in a Slurm job, or
    if this machine always has slots for the largest number of ranks.
    """

    range: ElasticRange
    wait_s: float = 300.0
    unit: int = 1
    batch: ElasticBatch | None = None
    hostfile: Path | None = None

    def ranks_for(self, slots: int) -> int:
        """Returns the largest possible number of ranks with this many slots; 0 if there are too few."""
        ranks = min(slots, self.range.most) // self.unit * self.unit
        return ranks if ranks >= self.range.least else 0

    def slots_here(self) -> int:
        """Returns the number of slots of this machine, outside of Slurm. Raises LaunchError if the file is faulty."""
        if self.hostfile is None:
            return self.range.most
        try:
            text = self.hostfile.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--hostfile {self.hostfile} cannot be read: {error}") from error
        return read_slots(text, host=socket.gethostname(), where=str(self.hostfile))


def read_slots(text: str, *, host: str, where: str) -> int:
    """Returns the slots that a hostfile gives to the machine `host`, which may also be called `localhost`.

    text: content of the file. Each line names a machine, with `slots=N` or `:N` after its name; without, it has one
    slot. where: name of the file, for messages. Raises LaunchError for another machine, or a wrong number.
    """
    slots = 0
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        name, _, after = words[0].partition(":")
        if name not in (host, host.partition(".")[0], "localhost", "127.0.0.1"):
            raise LaunchError(
                f"{where} names the machine {name}, and outside of a Slurm job an elastic run has its ranks on this "
                f"machine ({host}) only: start it in a Slurm job of several nodes"
            )
        count = next((word[6:] for word in words[1:] if word.startswith("slots=")), after or "1")
        if not count.isdigit():
            raise LaunchError(f"{where}: {line.strip()!r} gives no number of slots: write `{name} slots=4`")
        slots += int(count)
    return slots


def elastic_batch(document: Mapping[str, Any], *, range_: ElasticRange) -> ElasticBatch | None:
    """Returns the batch of an elastic run from its recipe; None if the recipe has none, which the ranks will report.

    document: content of the recipe, with the overrides of the command line. Raises UsageError if the recipe cannot be
    used with other numbers of ranks.
    """
    run, data = _table(document, "run"), _table(document, "data")
    if isinstance(run.get("ranks"), int):
        raise UsageError(
            f"the recipe asks for exactly run.ranks = {run['ranks']} ranks, and --elastic {range_} for another number "
            "after each loss: remove run.ranks from the recipe"
        )
    batch = data.get("global_batch")
    if not isinstance(batch, int):
        return None
    try:
        rule = BatchRule(run.get("elastic_batch", BatchRule.FIXED.value))
    except ValueError:
        return None  # the ranks report the key's possible values
    if rule is BatchRule.PER_RANK and batch % range_.most:
        raise UsageError(
            f"run.elastic_batch = 'per-rank' needs a global batch that {range_.most} ranks share evenly, and "
            f"data.global_batch is {batch}: set it to a multiple of {range_.most}"
        )
    micro, is_pipeline = data.get("micro_batches", 1), _table(document, "parallel").get("pipeline", 1) != 1
    return ElasticBatch(
        rule=rule,
        global_batch=batch,
        micro_batches=micro if isinstance(micro, int) and not is_pipeline else None,
        lr_scaling=str(_table(document, "optimizer").get("lr_scaling", "none")),
    )


def ranks_of_one_model(document: Mapping[str, Any]) -> int:
    """Returns how many ranks hold one copy of the recipe's model: `parallel.tensor` times `parallel.pipeline`."""
    parallel = _table(document, "parallel")
    sizes = [parallel.get(name, 1) for name in ("tensor", "pipeline")]
    tensor, pipeline = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
    return tensor * pipeline


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


_LOOKS_EVERY_S = 1.0


@final
class ResizeWatch:
    """Looks, in a thread of its own, for a better number of ranks than that of the running attempt.

    ranks: number of ranks of the attempt.
    find: function that returns the possible number of ranks now (0: fewer than the smallest number), and why. It may
    take some seconds, since it may ask other nodes.
    """

    def __init__(self, *, ranks: int, find: Callable[[], tuple[int, str]]) -> None:
        self._ranks = ranks
        self._find = find
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted: str | None = None

    def begin(self) -> None:
        """Starts to look. Call it when the launcher has been started: a fork must not meet this thread."""
        self._thread = threading.Thread(target=self._look, name="hpctrain-resize", daemon=True)
        self._thread.start()

    def wanted(self) -> str | None:
        """Returns why the run should be resized, as text for the user; None if its number of ranks is the best."""
        return self._wanted

    def end(self) -> None:
        """Stops looking. Does not wait for a `find` that asks another node."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LOOKS_EVERY_S)

    def _look(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY_S):
            try:
                ranks, why = self._find()
            except LaunchError:
                continue  # a file that is just being written; the next start reports a faulty one
            if ranks != self._ranks and not self._ended.is_set():
                number = f"{ranks} ranks" if ranks else "no ranks, until there are more slots"
                self._wanted = f"{why}: from {self._ranks} to {number}"
                return


_CHECKS_AGAIN_AFTER_S = 30.0
_ANSWERS = 2  # in a row: a node that boots answers before it is ready


@final
class NodeReturns:
    """Looks for nodes of the Slurm allocation that are not in use, answer again, and pass the check of nodes.

    in_use: nodes of the attempt.
    excluded: nodes that are not to be used, because of their failures.
    ranks_with: function that returns the number of ranks of a run on so many nodes.
    """

    def __init__(
        self,
        in_use: Sequence[str],
        *,
        excluded: Sequence[str],
        allocation: Allocation,
        checks: Checks,
        environ: Mapping[str, str],
        ranks_with: Callable[[int], int],
    ) -> None:
        self._in_use = tuple(in_use)
        self._others = tuple(node for node in allocation.nodes if node not in {*in_use, *excluded})
        self._allocation = allocation
        self._checks = checks
        self._environ = environ
        self._ranks_with = ranks_with
        self._answers: dict[str, int] = {}  # node -> answers in a row
        self._checks_from_s = 0.0

    def find(self) -> tuple[int, str]:
        """Returns the number of ranks on the nodes in use and those that have come back, and names the latter."""
        now = self._ranks_with(len(self._in_use))
        silent = without_slurmd(self._others, allocation=self._allocation)
        for node in self._others:
            self._answers[node] = 0 if node in silent else self._answers.get(node, 0) + 1
        back = [node for node in self._others if self._answers[node] >= _ANSWERS]
        if self._ranks_with(len(self._in_use) + len(back)) == now or time.monotonic() < self._checks_from_s:
            return now, ""
        self._checks_from_s = time.monotonic() + _CHECKS_AGAIN_AFTER_S
        left = nodes_now(self._allocation)
        survey = survey_nodes(
            [node for node in back if node in left],
            allocation=self._allocation,
            checks=self._checks,
            environ=self._environ,
        )
        usable = survey.usable
        return self._ranks_with(len(self._in_use) + len(usable)), f"{', '.join(usable)} can be used"


def pause_until(seconds: float, *, ends: Callable[[], bool]) -> None:
    """Sleeps for this many seconds, or until `ends` returns True."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not ends():
        time.sleep(0.2)
