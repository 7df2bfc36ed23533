"""Decides which causes a difference of a resumed run has. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.run.experiments.causes.findings import Cause, Finding, seen
from hpctrain.run.experiments.causes.observations import Observations

_KEPT = "keep it in a buffer of the model (register_buffer), or in a loop of your own save it in also={...}"
_DRAWN = "draw from those, or from a generator that is made of the seed and the step"
_OF_ONE_PROCESS = (Cause.NOT_DETERMINISTIC, Cause.OWN_RANDOM)


def resumption_findings(seen_: Observations, known: set[Cause]) -> Iterator[Finding]:
    resumed = seen_.resumed
    if resumed is None or any(cause in known for cause in _OF_ONE_PROCESS):
        return
    evidence = seen("1 rank, stopped and resumed", resumed.plain)
    if not resumed.plain.equal:
        if resumed.with_generators is not None and resumed.with_generators.equal:
            names = ", ".join(list(seen_.own_generators)[:3])
            yield Finding(
                cause=Cause.OWN_RANDOM, is_difference=True,
                text=f"the resumed run differs, and is equal once the state of {names} is carried over: "
                "checkpoints have "
                "only the generators of torch, numpy and Python",
                evidence=evidence,
                advice=_DRAWN,
            )  # fmt: skip
        elif resumed.with_state is not None and resumed.with_state.equal:
            yield _own_state(seen_, evidence)
        elif (first := resumed.plain.earliest) is not None and first.kind == "samples":
            yield Finding(
                cause=Cause.DATA_ORDER, is_difference=True,
                text="the resumed run gets other samples than the run that was not stopped", evidence=evidence,
                advice="let the order be a function of seed and epoch, and begin at the saved position",
            )  # fmt: skip
        else:
            yield Finding(
                cause=Cause.OWN_STATE, is_difference=True,
                text="the resumed run differs: something that training changes is not in the checkpoint, and was "
                "not found "
                "in attributes of the task, the model or the optimizer",
                evidence=evidence, advice=f"{_KEPT}, or compute it from the step",
            )  # fmt: skip
    elif seen_.own_draws_matter:
        yield Finding(
            cause=Cause.OWN_RANDOM, is_difference=True,
            text=f"training draws from {', '.join(list(seen_.own_generators)[:3])}, whose state is not in the "
            "checkpoint: checkpoints have only the generators of torch, numpy and Python",
            evidence=[
                "1 rank, stopped and resumed: equal, since the few steps happened to draw alike; with other numbers "
                "drawn 1 rank differs from itself"
            ],
            advice=_DRAWN,
        )  # fmt: skip
    elif seen_.ranks_resumed is not None and not seen_.ranks_resumed.equal and seen_.buffers_apart:
        names = ", ".join(seen_.buffers_apart[:3])
        if Cause.BATCH_STATISTICS not in known:
            yield Finding(
                cause=Cause.BUFFER, is_difference=True,
                text=f"buffer {names} differs between the ranks, and training reads it: a checkpoint has rank 0's only",
                evidence=seen(f"{seen_.num_ranks} ranks, stopped and resumed", seen_.ranks_resumed),
                advice="sum what it is computed from over the ranks",
            )  # fmt: skip


def _own_state(seen_: Observations, evidence: list[str]) -> Finding:
    paths = {path: kind for path, kind in seen_.own_state.items() if kind != "generator"}
    names = ", ".join(list(paths)[:3])
    buffers = [path for path, kind in paths.items() if kind == "buffer"]
    in_optimizer = all(path.startswith("optimizer") for path in paths)
    return Finding(
        cause=Cause.OPTIMIZER if in_optimizer else Cause.BUFFER if buffers else Cause.OWN_STATE, is_difference=True,
        text=f"the resumed run differs, and is equal once {names} is carried over: it is not in the checkpoint",
        evidence=evidence,
        advice="register it with persistent=True" if buffers else _KEPT,
    )  # fmt: skip
