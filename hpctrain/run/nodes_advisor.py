"""Advises a running job, on rank 0, whether more or fewer nodes would pay. The advice is computed on a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from hpctrain.errors import UsageError
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.scaling import NodesAdvice, RunEvidence, ScalingGoal, advise_nodes, no_advice
from hpctrain.telemetry import STEP, RunDirectory, Sinks

SCALING = "scaling"  # the kind of the records
# The shortest time between two computations of the advice, each of some hundredths of a second on one core.
ADVICE_EVERY_S = 30.0
_ENDING_MAY_TAKE_S = 5.0


@final
class NodesAdvisor:
    """A sink that collects evidence from rank 0's records, and computes advice from it on a thread.

    New advice is computed when the ranks have been compared, at most once per `every_s` seconds. Nothing grows with
    the number of ranks or the length of the run, and no rank communicates.

    Args:
        evidence: Collects the records.
        goal, least_gain: What another number of nodes is to lower, and the smallest decrease, a share.
        num_ranks: The ranks of the run. One rank is never compared; then its steps count.
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
        every_s: float = ADVICE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evidence = evidence
        self._goal = goal
        self._least_gain = least_gain
        self._new_evidence = STEP if num_ranks == 1 else "efficiency"
        self._num_nodes = num_nodes
        self._every_s = every_s
        self._clock = clock
        self._due_s = -float("inf")
        self._lock = threading.Lock()  # of the evidence
        self._wanted = threading.Event()
        self._ended = False
        self._records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._advise_until_ended, name="hpctrain-advice", daemon=True)
        self._thread.start()

    def receive(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the evidence, and asks the thread for new advice if it is due."""
        with self._lock:
            self._evidence.add(record)
        if record["kind"] == self._new_evidence and self._clock() >= self._due_s:
            self._wanted.set()

    def take(self) -> list[dict[str, Any]]:
        """Returns the records of the advice since the last call, with the fields that docs/metrics.md describes."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
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
            advice, step, steps_left = self._advice()
            if advice is not None:
                self._due_s = self._clock() + self._every_s
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
) -> NodesAdvisor | None:
    """Starts the advisor on rank 0, as a sink; returns None on all other ranks. Not collective.

    Args:
        environment: The content of `environment.json`.
        step: The step from which training starts.
        started: When this start of the run began, in seconds since 1970.
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
        earlier = directory.starts()[:-1] if _starts_are_few(directory) else []
        evidence = RunEvidence(
            [*earlier, start], probe=directory.document("probe.json"),
            calibrations=(directory.document("reduction.json") or {}).get("entries", ()),
        )  # fmt: skip
        for record in directory.newest_steps(max_bytes=_EARLIER_BYTES):
            evidence.add(record)
        found.append(
            NodesAdvisor(
                evidence, goal=ScalingGoal(recipe.scaling.goal), least_gain=recipe.scaling.least_gain_percent / 100,
                num_ranks=session.world_size, num_nodes=session.topology.num_nodes,
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
