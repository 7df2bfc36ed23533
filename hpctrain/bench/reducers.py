"""The reducers that are measured: made as for training, by name."""

from __future__ import annotations

from hpctrain.bench.all_reduce import MakeReducer
from hpctrain.errors import UsageError
from hpctrain.reduce.reducer import BucketReducer
from hpctrain.run.session import Session

ALGORITHMS = (
    "auto", "flat", "ring", "direct", "hierarchical", "hierarchical-ring", "hierarchical-flat",
    "nccl-hierarchical", "nccl-torus",
)  # fmt: skip
WIRES = ("auto", "fp32", "fp16", "bf16", "int8", "top-k", "low-rank")
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


def make_from(session: Session) -> MakeReducer:
    """Reducers as a training run of this session has them."""

    def make(algorithm: str, wire: str) -> BucketReducer:
        return session.bucket_reducer(algorithm=algorithm, wire=wire)

    return make
