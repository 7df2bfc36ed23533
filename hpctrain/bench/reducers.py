"""The reducers that are measured: made as for training, by name."""

from __future__ import annotations

from hpctrain.bench.all_reduce import MakeReducer
from hpctrain.errors import UsageError
from hpctrain.reduce.algorithm import (
    ALGORITHM_NAMES,
    AUTO,
    WIRE_NAMES,
    Algorithm,
    Means,
    decide,
    parse_algorithm,
)
from hpctrain.reduce.low_rank import LowRankReducer
from hpctrain.reduce.make import ReducerMaker
from hpctrain.reduce.reducer import BucketReducer
from hpctrain.reduce.top_k import TopKReducer
from hpctrain.run.session import Session

ALGORITHMS = ALGORITHM_NAMES
WIRES = WIRE_NAMES
# Measured unless others are asked for: what may be used without losing more than a rounding.
USUAL_WIRES = ("fp32", "fp16")


def parse_names(text: str, *, option: str, valid: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Names with commas between, each once, in the order given; `all` for the usual ones. Raises UsageError."""
    if text.strip() == "all":
        return usual
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise UsageError(f"{option}: there is no {unknown[0]!r}; choose among {', '.join(valid)}, or all")
    return names


def make_from(session: Session, *, gradient_bytes: int) -> MakeReducer:
    """Reducers as a training run of this session has them. Collective, and so is what it returns.

    gradient_bytes: of all buckets that one of them gets.
    """
    maker = ReducerMaker(
        session.world, topology=session.topology, device=session.device.type, gradient_bytes=gradient_bytes,
        note=session.note,
    )  # fmt: skip

    def make(algorithm: str, wire: str) -> BucketReducer:
        if AUTO in (algorithm, wire):
            return session.bucket_reducer(algorithm=algorithm, wire=wire)
        asked = parse_algorithm(algorithm)
        _check_runs(asked, wire=wire, means=maker.means)
        # From the first reduction on as they are in the middle of a training run.
        if wire == "top-k" and session.num_ranks > 1:
            return TopKReducer(session.world.duplicate(), topology=session.topology, start_step=0)
        if wire == "low-rank" and session.num_ranks > 1:
            return LowRankReducer(session.world.duplicate(), topology=session.topology, start_step=0)
        return maker.make(asked, wire=wire)

    return make


def _check_runs(asked: Algorithm, *, wire: str, means: Means) -> None:
    """UsageError, without the name of `asked`, where it would not run as itself."""
    if means.topology.num_ranks == 1:
        if asked is not Algorithm.FLAT:
            raise UsageError("one rank sends nothing, by any algorithm: see flat")
        return
    decision = decide(asked, wire=wire, means=means)
    if decision.note is not None:
        reason = decision.note.rpartition(" is used: ")[2]
        raise UsageError(f"{decision.algorithm.value} would run instead: {reason}")
