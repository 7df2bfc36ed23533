"""Makes the reducers to be measured, in the same way as for training."""

from __future__ import annotations

from typing import Any, final

from hpctrain.bench.sizes import describe_bytes
from hpctrain.errors import UsageError
from hpctrain.reduce import (
    ALGORITHM_NAMES,
    AUTO,
    NCCL_ALGORITHMS,
    SPARSE_WIRES,
    WIRE_NAMES,
    Algorithm,
    BucketReducer,
    LowRankReducer,
    Means,
    ReducerMaker,
    ScatterReducer,
    TopKReducer,
    decide,
    parse_algorithm,
)
from hpctrain.run import AUTO_WIRES, ReductionPlan, Session, make_reduction

ALGORITHMS = ALGORITHM_NAMES
WIRES = WIRE_NAMES
# Measured by default: wire formats that lose no more than a rounding.
USUAL_WIRES = ("fp32", "fp16")


def parse_names(text: str, *, option: str, valid: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Parses names separated by commas. Returns each once, in the order given; `usual` for `all`. Raises UsageError."""
    if text.strip() == "all":
        return usual
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise UsageError(f"{option}: there is no {unknown[0]!r}; choose among {', '.join(valid)}, or all")
    return names


def nccl_to_start(algorithms: tuple[str, ...]) -> str | None:
    """The requested NCCL algorithm of Horovod, which Horovod must know when it starts; None if none is requested.

    Raises UsageError for more than one.
    """
    asked = [name for name in algorithms if name in NCCL_ALGORITHMS]
    if len(asked) > 1:
        raise UsageError(
            f"--algorithms: {' and '.join(asked)} cannot be measured in one process, as Horovod runs the one that it "
            "was started with: measure them one after another"
        )
    return asked[0] if asked else None


@final
class ReducersHere:
    """Makes reducers as a training run of this session does: a `MakeReducer`. Collective.

    gradient_bytes: total size of the buckets of one reducer. If the algorithm or the wire is `auto`, a calibration is
    measured (results cached by earlier runs are not used); `calibrations` has its numbers and the choice.
    nccl: the NCCL algorithm of Horovod that the session was started with.
    """

    def __init__(self, session: Session, *, gradient_bytes: int, nccl: str | None = None) -> None:
        self._session = session
        self._nccl = session.reductions.nccl(nccl or AUTO)
        self._gradient_bytes = gradient_bytes
        self._maker = ReducerMaker(
            session.world, topology=session.topology, device=session.device.type, gradient_bytes=gradient_bytes,
            nccl=self._nccl, note=session.note,
        )  # fmt: skip
        self.calibrations: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, algorithm: str, wire: str) -> BucketReducer:
        session = self._session
        if algorithm != AUTO:
            wires = AUTO_WIRES if wire == AUTO else (wire,)
            for each in wires:
                check_runs(parse_algorithm(algorithm), wire=each, means=self._maker.means)
        if AUTO in (algorithm, wire):
            return self._by_measurement(algorithm, wire)
        # start_step=0: compressed from the first reduction on, as in the middle of a training run.
        if wire == "top-k" and session.world_size > 1:
            return TopKReducer(session.world.duplicate(), topology=session.topology, start_step=0)
        if wire == "low-rank" and session.world_size > 1:
            return LowRankReducer(session.world.duplicate(), topology=session.topology, start_step=0)
        return self._maker.make(parse_algorithm(algorithm), wire=wire)

    def _by_measurement(self, algorithm: str, wire: str) -> BucketReducer:
        session = self._session
        made = make_reduction(
            session.world, ReductionPlan(algorithm=algorithm, wire=wire), topology=session.topology,
            device=session.device, gradient_bytes=self._gradient_bytes, nccl=self._nccl, note=session.note,
        )  # fmt: skip
        self.calibrations[algorithm, wire] = made.record
        assert not isinstance(made.reducer, ScatterReducer)
        return made.reducer

    def runs(self, algorithm: str, wire: str, *, num_bytes: int) -> str | None:
        """The algorithm that `auto` selects for a bucket of this size; None if there was no calibration."""
        ranges = self.calibrations.get((algorithm, wire), {}).get("ranges", [])
        below = [entry["algorithm"] for entry in ranges if entry["from_bytes"] <= num_bytes]
        return below[-1] if below else None

    def lines(self) -> list[str]:
        """Lines that describe every choice and the measurements it is based on."""
        lines = []
        for (algorithm, wire), record in self.calibrations.items():
            head = f"auto, {wire}" if algorithm == AUTO else f"{algorithm}, wire auto"
            chosen = ", ".join(
                f"from {describe_bytes(entry['from_bytes'])} {entry['algorithm']} ({entry['wire']})"
                for entry in record.get("ranges", [])
            )
            lines.append(
                f"{head}: {chosen}; buckets of {describe_bytes(record['bucket_bytes'])} ({record['source']})"
            )
            for entry in record.get("candidates", []):
                rate = (
                    "-" if entry["seconds_per_byte"] <= 0 else f"{1e-6 / entry['seconds_per_byte']:,.0f} MB/s"
                )
                lines.append(
                    f"  {entry['algorithm']}, {entry['wire']}: latency {1e3 * entry['latency_s']:.3g} ms, {rate} in "
                    f"large buckets, from {len(entry['measured'])} sizes"
                )
        return lines


def check_runs(asked: Algorithm, *, wire: str, means: Means) -> None:
    """Raises UsageError if another algorithm would run in place of `asked`. The message does not name `asked`."""
    if means.topology.num_ranks == 1:
        if asked is not Algorithm.FLAT:
            raise UsageError("one rank sends nothing, so that all algorithms are the same: see flat")
        return
    if asked is Algorithm.FLAT and means.nccl is not None and wire not in SPARSE_WIRES:
        raise UsageError(f"{means.nccl.value} would run instead: Horovod was started with it")
    decision = decide(asked, wire=wire, means=means)
    if decision.note is not None:
        reason = decision.note.rpartition(" is used: ")[2]
        raise UsageError(f"{decision.algorithm.value} would run instead: {reason}")
