"""Writes down when each part of chosen steps began and ended, on every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from hpctrain.comm import World, make_shared_folder
from hpctrain.errors import LaunchError
from hpctrain.reduce import DistributedOptimizer
from hpctrain.scaling import TRACE_FOLDER, measure_clock_offset
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.topology import Topology


@final
class StepTrace:
    """Traces the steps in `steps`, ascending ranges; the others cost a comparison each.

    directory: of the run; a range of steps has a folder there, and each rank a file in it. The clocks of the nodes are
    compared before and after a range. say: prints on rank 0.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        steps: Sequence[range],
        directory: Path,
        updater: DistributedOptimizer,
        clock: StepClock,
        say: Callable[[str], None],
    ) -> None:
        self._world = world
        self._topology = topology
        self._steps = steps
        self._directory = directory
        self._updater = updater
        self._clock = clock
        self._say = say
        self._records: RecordWriter | None = None
        self._step = 0
        self._spans: deque[dict[str, Any]] = deque()

    def after_step(self, step: int) -> None:
        """Step `step` has ended, or the run begins after it. Collective if tracing begins or ends here."""
        if not self._steps:
            return
        self._step = step + 1
        self._write()
        wanted = any(step + 1 in steps for steps in self._steps)
        if wanted and self._records is None:
            self._begin()
        elif not wanted:
            self.ends()

    def ends(self) -> None:
        """Ends tracing, if it is on. Collective."""
        if self._records is None:
            return
        self._clock.observer = None
        self._updater.observe_reductions(None)
        self._write()
        self._compare_clocks(self._records)
        self._records.close()
        self._records = None

    # ------------------------------------------------------------------ details

    def _begin(self) -> None:
        folder = self._directory / TRACE_FOLDER / f"step-{self._step:08}"
        try:
            make_shared_folder(folder, comm=self._world)
        except LaunchError as error:  # on all ranks; training goes on without the trace
            self._say(f"no trace: {error}")
            self._steps = ()
            return
        rank = self._world.rank
        path = folder / f"rank-{rank:05}.jsonl"
        path.unlink(missing_ok=True)  # what an earlier start traced of the same steps
        self._records = RecordWriter(path)
        self._records.write({
            "kind": "rank", "rank": rank, "ranks": self._world.num_ranks,
            "node": self._topology.node_names[self._topology.node_of(rank)],
            "clock_s": time.perf_counter(), "time": time.time(),
        })  # fmt: skip
        self._compare_clocks(self._records)
        self._clock.observer = self._saw
        self._updater.observe_reductions(self._saw_reduction)

    def _compare_clocks(self, records: RecordWriter) -> None:
        with self._clock.span("exposed_sync"):
            offset = measure_clock_offset(self._world, self._topology)
        records.write({
            "kind": "clock", "clock_s": offset.clock_s, "offset_s": offset.offset_s, "error_s": offset.error_s,
        })  # fmt: skip

    def _saw(self, name: str, begin_s: float, end_s: float) -> None:
        if end_s > begin_s:
            self._spans.append({
                "kind": "span", "step": self._step, "name": name, "begin_s": begin_s, "end_s": end_s,
            })  # fmt: skip

    def _saw_reduction(self, bucket: int, begin_s: float, end_s: float) -> None:
        # On the reduction thread. Parameters that are gathered during the next step count as a part of that.
        self._spans.append({
            "kind": "span", "step": self._step, "name": f"bucket {bucket}", "begin_s": begin_s, "end_s": end_s,
            "bucket": bucket,
        })  # fmt: skip

    def _write(self) -> None:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]  # others are added meanwhile
        if self._records is not None:
            self._records.write_all(spans)
