"""Advises a running job, on rank 0, whether more or fewer nodes would pay, and asks for these nodes if it may."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from hpctrain.errors import UsageError
from hpctrain.resilience import StopRequest
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.scaling import NodesAdvice, RunEvidence, ScalingGoal, advise_nodes, no_advice
from hpctrain.storage import replace_file
from hpctrain.telemetry import SCALING_STOP, STEP, RunDirectory, Sinks, tell

SCALING = "scaling"  # the kind of the records
_ENDING_MAY_TAKE_S = 5.0


# The variable with the path of the file in which a run asks for another number of nodes. Whoever starts the ranks again
# sets it and reads the file when the ranks have stopped: the first line has the number, the second one the reason.
WISH_VARIABLE = "HPCTRAIN_WISH"
# The number of computations of the advice in a row that must name the same number of nodes.
AGREEING = 3


@final
class NodesRequest:
    """Asks for another number of nodes: writes the wish, and requests a stop of the run.

    The run asks at a save, and only if the advice has named the same number `AGREEING` times in a row, if it has
    trained for at least `after_s` seconds since its start, and if it has not left that number of nodes on advice
    before.
    So a run asks at most once per start, and does not go back and forth.

    Args:
        wish: The file in which the run asks.
        left: The numbers of nodes that this run has left on advice.
        stop: The request of rank 0, with which all ranks stop.
    """

    def __init__(
        self,
        wish: Path,
        *,
        after_s: float,
        left: frozenset[int],
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wish = wish
        self._left = left
        self._stop = stop
        self._clock = clock
        self._not_before_s = clock() + after_s
        self._wanted: NodesAdvice | None = None
        self._agreeing = 0

    def consider(self, advice: NodesAdvice) -> None:
        """Takes new advice."""
        same = self._wanted is not None and self._wanted.advised == advice.advised
        self._agreeing = self._agreeing + 1 if same else 1
        self._wanted = advice

    def at_save(self, step: int) -> dict[str, Any] | None:
        """Asks for the advised nodes if it is time. Returns a record of the kind `resize` if it has asked, else None.

        step: the step that is saved. Raises OSError if the wish cannot be written.
        """
        advice = self._wanted
        if (
            advice is None or not advice.moves or advice.advised in self._left or self._agreeing < AGREEING
            or self._clock() < self._not_before_s or self._stop.requested
        ):  # fmt: skip
            return None
        content = f"{advice.advised}\n{advice.text}\n".encode()
        replace_file(self._wish, content, partial=self._wish.with_name(f".{self._wish.name}.partial"))
        # Without parentheses, at which readers of the line about the stop would end the reason.
        self._stop.request(f"{SCALING_STOP}{advice.advised} instead of {advice.nodes} nodes")
        return {
            "kind": "resize", "time": time.time(), "step": step, "nodes": advice.nodes, "to_nodes": advice.advised,
            "reason": advice.text,
        }  # fmt: skip


def open_request(
    recipe: Recipe,
    *,
    starts: Sequence[Mapping[str, Any]],
    stop: StopRequest,
    environ: Mapping[str, str] = os.environ,
) -> tuple[NodesRequest | None, str]:
    """Returns what asks for other nodes, and a text for the user; (None, text) if the run may not or cannot ask.

    starts: the lines of `starts.jsonl`, oldest first, the newest of which is about this start.
    """
    if not recipe.scaling.act:
        return None, ""
    path = environ.get(WISH_VARIABLE)
    if path is None:
        return None, (
            "scaling.act = true has no effect: this run is not in a job of `hpctrain slurm submit`, which would start "
            "it on other nodes"
        )
    left = []
    for before, start in pairwise(starts):
        if (start.get("before") or {}).get("stopped") != "scaling":
            continue
        numbers = [len(one["environment"]["node_names"]) for one in (before, start)]
        if numbers[0] == numbers[1]:
            return None, (
                f"scaling.act: the run has asked for other nodes before, and has got {numbers[1]} again: it does not "
                "ask any more"
            )
        left.append(numbers[0])
    after_s = 60 * recipe.scaling.act_after_minutes
    return NodesRequest(Path(path), after_s=after_s, left=frozenset(left), stop=stop), ""


@final
class NodesAdvisor:
    """A sink that collects evidence from rank 0's records, and computes advice from it on a thread.

    New advice is computed when the ranks have been compared, at most once per `every_s` seconds. Nothing grows with
    the number of ranks or the length of the run, and no rank communicates.

    Args:
        evidence: Collects the records.
        goal, least_gain: What another number of nodes is to lower, and the smallest decrease, a share.
        num_ranks: The ranks of the run. One rank is never compared; then its steps count.
        request: Asks for the advised nodes; None: the run does not act on the advice.
    """

    name = "advice on the number of nodes"

    def __init__(
        self,
        evidence: RunEvidence,
        *,
        goal: ScalingGoal,
        least_gain: float,
        num_ranks: int,
        num_nodes: int,
        every_s: float,
        request: NodesRequest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evidence = evidence
        self._goal = goal
        self._least_gain = least_gain
        self._new_evidence = STEP if num_ranks == 1 else "efficiency"
        self._num_nodes = num_nodes
        self._request = request
        self._every_s = every_s
        self._clock = clock
        self._due_s = -float("inf")
        self._lock = threading.Lock()  # of the evidence
        self._wanted = threading.Event()
        self._ended = False
        self._error: Exception | None = None
        self._records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._advise_until_ended, name="hpctrain-advice", daemon=True)
        self._thread.start()

    def receive(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the evidence, asks the thread for new advice if it is due, and at a save for other nodes."""
        if self._error is not None:
            raise self._error
        with self._lock:
            self._evidence.add(record)
        if record["kind"] == self._new_evidence and self._clock() >= self._due_s:
            self._wanted.set()
        if self._request is not None and record["kind"] == "checkpoint":
            asked = self._request.at_save(record["step"])
            if asked is not None:
                self._records.put(asked)

    def take(self) -> list[dict[str, Any]]:
        """Returns the records of the advice since the last call, with the fields that docs/metrics.md describes."""
        found = []
        while not self._records.empty():  # only this thread takes records out
            found.append(self._records.get_nowait())
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._wanted.set()
        self._thread.join(_ENDING_MAY_TAKE_S)

    def _advise_until_ended(self) -> None:
        while True:
            self._wanted.wait()
            if self._ended:
                return
            self._wanted.clear()
            try:
                advice, step, steps_left = self._advice()
            except Exception as error:  # the thread that trains raises it, and continues without advice
                self._error = error
                return
            if advice is not None:
                self._due_s = self._clock() + self._every_s
                if self._request is not None:
                    self._request.consider(advice)
                self._records.put({
                    "kind": SCALING, "time": time.time(), "step": step, "steps_left": steps_left, **advice.document(),
                })  # fmt: skip

    def _advice(self) -> tuple[NodesAdvice | None, int | None, int | None]:
        """Returns the advice, the step after which it was computed, and the steps left.

        The advice is None before enough is known for the first one.
        """
        try:
            with self._lock:
                step, enough = self._evidence.step, self._evidence.enough
                job = self._evidence.job() if enough else None
            if job is None:
                return None, step, None
            return advise_nodes(job, goal=self._goal, least_gain=self._least_gain), step, job.steps_left
        except UsageError as error:
            return no_advice(error, nodes=self._num_nodes, goal=self._goal), step, None


def open_advisor(
    sinks: Sinks,
    recipe: Recipe,
    *,
    session: Session,
    environment: Mapping[str, Any],
    step: int,
    total_steps: int,
    started: float,
    stop: StopRequest,
) -> NodesAdvisor | None:
    """Starts the advisor on rank 0, as a sink; returns None on all other ranks. Not collective.

    Args:
        environment: The content of `environment.json`.
        step: The step from which training starts.
        started: When this start of the run began, in seconds since 1970.
        stop: The request to stop of this rank.
    """
    if session.rank != 0:
        return None
    directory = RunDirectory(Path(recipe.run.directory))
    start = {
        "time": started, "step": step, "total_steps": total_steps, "recipe": recipe.model_dump(),
        "environment": environment,
    }  # fmt: skip
    found: list[NodesAdvisor] = []

    def make() -> NodesAdvisor:
        starts = directory.starts() if recipe.scaling.act or _starts_are_few(directory) else []
        request, note = open_request(recipe, starts=starts, stop=stop)
        if note:
            tell(note)
        earlier = starts[:-1]
        evidence = RunEvidence(
            [*earlier, start], probe=directory.document("probe.json"),
            calibrations=(directory.document("reduction.json") or {}).get("entries", ()),
        )  # fmt: skip
        for record in directory.newest_steps(max_bytes=_EARLIER_BYTES):
            evidence.add(record)
        found.append(
            NodesAdvisor(
                evidence, goal=ScalingGoal(recipe.scaling.goal), least_gain=recipe.scaling.least_gain_percent / 100,
                num_ranks=session.world_size, num_nodes=session.topology.num_nodes, request=request,
                every_s=recipe.scaling.every_s,
            )
        )  # fmt: skip
        return found[0]

    sinks.open(NodesAdvisor.name, make)
    return found[0] if found else None


# Of earlier starts, for the share of computing that does not depend on the samples: rank 0's last records, and lines
# of starts.jsonl, each of which names every rank.
_EARLIER_BYTES = 1 << 20
_MOST_STARTS_BYTES = 8 << 20


def _starts_are_few(directory: RunDirectory) -> bool:
    with contextlib.suppress(OSError):
        return (directory.path / "starts.jsonl").stat().st_size <= _MOST_STARTS_BYTES
    return False
