"""What the measurements of a run mean, in sentences that each name a number and where it was measured. Pure.

Why a run is slower a rank than another follows from identities: samples/s of a rank, relative to the reference, is the
product of the ratios of the factors (load balance, serialisation, transfer, share of computing) and of computation
scaling. The part of a factor f in a loss to e is ln f / ln e, which adds up to 1 over the factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpctrain.report.by_axis import stage_seconds
from hpctrain.report.reduction_limit import Level, ReductionLimit
from hpctrain.report.run_data import RunData
from hpctrain.scaling import Efficiency, against, own_times
from hpctrain.supervise import effective_time

# Parts of a step below this share are not worth a sentence.
_WORTH_NAMING = 0.03
# POP's experience: parallel efficiencies of at least 80 % are acceptable.
ACCEPTABLE = 0.8
# Reductions that take at least this many times what their bytes need are worth a look.
_FAR_FROM_LIMIT = 2.0
_HALF_AS_MANY_BYTES = {"fp32": "fp16", "fp16": "int8", "bf16": "int8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """weight: for the order, the largest first. source: which measurement says so."""

    text: str
    source: str
    weight: float
    kind: Literal["good", "note", "problem"] = "note"


def conclude(
    run: RunData, *, reference: RunData | None = None, limit: ReductionLimit | None = None
) -> list[Conclusion]:
    """Returns what is worth knowing about a run, the most important first.

    reference: what it is compared with. limit: of its reductions.
    """
    found: list[Conclusion] = [*_of_attempts(run), *_of_incidents(run)]
    if run.efficiency is not None:
        found += _of_parts(run, run.efficiency)
        if limit is not None:
            found += _of_limit(limit, step_s=run.efficiency.step_s)
        if reference is not None and reference.efficiency is not None and reference is not run:
            found += _of_scaling(run, run.efficiency, reference=reference, base=reference.efficiency)
    return sorted(found, key=lambda conclusion: -conclusion.weight)


def factors_of_loss(run: Efficiency, *, reference: Efficiency) -> dict[str, float]:
    """Returns by what each cause multiplies the samples/s of a rank; their product is the whole change."""
    ours, theirs = run.factors, reference.factors
    return {
        "computation scaling": against(run, reference=reference).computation,
        "load balance": _ratio(ours.load_balance, theirs.load_balance),
        "serialisation": _ratio(ours.serialisation, theirs.serialisation),
        "transfer": _ratio(ours.transfer, theirs.transfer),
        "share of computing": _ratio(ours.computing, theirs.computing),
    }


_MEANS = {
    "computation scaling": "computing takes longer for each sample",
    "load balance": "some ranks have more to do than others",
    "serialisation": "in each step another rank is the slowest, or stages of a pipeline wait for each other",
    "transfer": "reductions take time that no computing hides",
    "share of computing": "ranks spend time on input, checkpoints and other work",
}


def _of_scaling(
    run: RunData, ours: Efficiency, *, reference: RunData, base: Efficiency
) -> Iterator[Conclusion]:
    speed = against(ours, reference=base).relative_speed
    factors = factors_of_loss(ours, reference=base)
    cause, factor = min(factors.items(), key=lambda item: item[1])
    text = f"{_ranks(run)} reach {speed:.0%} of the samples/s of each rank of {reference.label} ({_ranks(reference)})"
    kind: Literal["good", "note", "problem"] = "good" if speed >= ACCEPTABLE else "problem"
    if speed < 0.97 and factor < 1:
        part = math.log(factor) / math.log(speed)
        text += (
            f"; the largest cause is {cause} ({factor:.2f}, {min(part, 1):.0%} of the loss): {_MEANS[cause]}"
        )
        if cause == "computation scaling" and run.shares_cores:
            text += ", since here the ranks of a node share cores"
    yield Conclusion(
        text=text + ".",
        source=f"records of both runs, {ours.steps} and {base.steps} steps",
        weight=3,
        kind=kind,
    )


def _of_stages(run: RunData) -> Iterator[Conclusion]:
    """Names the stage of a pipeline that computes longest, if the others wait for it."""
    seconds = stage_seconds(run)
    if len(seconds) < 2:
        return
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    excess = seconds[longest] / (sum(seconds) / len(seconds)) - 1
    if excess >= _WORTH_NAMING:
        yield Conclusion(
            text=f"Stage {longest} (of 0 to {len(seconds) - 1}) computes {excess:.0%} longer than the mean stage, and "
            "the others wait for it: blocks are divided evenly, and what is before the first and after the last one "
            "adds to the first and last stage.",
            source=f"compute of the ranks of each stage: {', '.join(f'{1e3 * each:.3g}' for each in seconds)} ms",
            weight=excess, kind="problem",
        )  # fmt: skip


def _of_parts(run: RunData, found: Efficiency) -> Iterator[Conclusion]:
    source = f"all ranks, {found.steps} steps of {1e3 * found.step_s:.3g} ms"
    share = {name: seconds / found.step_s for name, seconds in found.parts.items()} if found.step_s else {}
    parallel = found.factors.parallel
    if found.ranks > 1:
        yield Conclusion(
            text=f"Parallel efficiency is {parallel:.0%}: of the ranks' time, {1 - parallel:.0%} is waiting for each "
            "other or for the network.",
            source=source, weight=2, kind="good" if parallel >= ACCEPTABLE else "problem",
        )  # fmt: skip
    exposed = share.get("exposed_reduction", 0.0)
    if exposed >= _WORTH_NAMING:
        yield Conclusion(text=_reduction_text(run, exposed), source=source, weight=exposed, kind="problem")
    if (waiting := share.get("waiting", 0.0)) >= _WORTH_NAMING:
        yield Conclusion(
            text=_waiting_text(run, found, waiting), source=source, weight=waiting, kind="problem"
        )
    yield from _of_stages(run)
    for name, advice in (
        (
            "bubble",
            "more parallel.micro_batches or schedule = 'interleaved' (docs/guides/parallelism.md) shorten it",
        ),
        ("input", "data.workers and data.staging (docs/guides/data.md) move it out of the step"),
        ("checkpoint", "checkpoint.mode = 'async' or fewer saves shorten it"),
        ("evaluation", "fewer evaluations or data.evaluation_samples shorten it"),
        ("other", "a trace of some steps shows what it is (hpctrain trace)"),
    ):
        if share.get(name, 0.0) >= _WORTH_NAMING:
            gain = 1 / (1 - share[name])
            yield Conclusion(
                text=f"{share[name]:.0%} of the step is {name}; without it the run would be {gain:.2f} x as fast; "
                f"{advice}.",
                source=source, weight=share[name], kind="problem",
            )  # fmt: skip
    if run.shares_cores:
        yield Conclusion(
            text="The ranks of a node share cores, so that times here do not show what ranks with cores of their own "
            "would reach.",
            source="cores and threads in environment.json", weight=0.5,
        )  # fmt: skip


def _reduction_text(run: RunData, exposed: float) -> str:
    wire = str(run.environment.get("wire", ""))
    text = f"{exposed:.0%} of the step is exposed reduction"
    # Split layers and pipelines are summed in the gradients' dtype.
    if wire in _HALF_AS_MANY_BYTES and run.environment.get("algorithm") not in (
        "torch.distributed",
        "pipeline",
    ):
        smaller = _HALF_AS_MANY_BYTES[wire]
        gain = 1 / (1 - exposed / 2)
        text += f"; {smaller} on the wire instead of {wire} would give at most {gain:.2f} x, if bytes bind"
    return text + "."


def _of_limit(limit: ReductionLimit, *, step_s: float) -> Iterator[Conclusion]:
    """Says how far the reductions are from what links and memory allow, if both are known."""
    times, measured_s, least_s = limit.times_least, limit.measured_s, limit.least_s
    if times is None or measured_s is None or least_s is None or not step_s:
        return
    levels = [level for level in (limit.nodes, limit.ranks) if level is not None]
    bound = max(levels, key=lambda level: level.least_s or 0)
    where = "between nodes" if bound is limit.nodes else "within a node"
    exposed = (limit.exposed_s or 0.0) / step_s
    yield Conclusion(
        text=f"A step's reductions take {1e3 * measured_s:.3g} ms, of which {1e3 * (limit.exposed_s or 0):.3g} ms are "
        f"exposed: {times:.1f} x the {1e3 * least_s:.3g} ms that {_bytes_at(bound)} need {where} at least.",
        source=f"efficiency of all ranks; rate: {bound.source}", weight=exposed,
        kind="problem" if times >= _FAR_FROM_LIMIT and exposed >= _WORTH_NAMING else "note",
    )  # fmt: skip


def _bytes_at(level: Level) -> str:
    return f"{(level.sent_bytes or 0) / 1e6:.3g} MB at {(level.bytes_per_s or 0) / 1e6:,.0f} MB/s"


def _waiting_text(run: RunData, found: Efficiency, waiting: float) -> str:
    factors = found.factors
    text = f"{waiting:.0%} of the step is waiting for slower ranks, "
    if factors.load_balance < factors.serialisation:
        text += f"mostly for the same ones (load balance {factors.load_balance:.2f})"
        if run.times is not None:
            slowest = int(own_times(run.times).mean(axis=1).argmax())
            text += f": rank {slowest} on {run.environment['ranks'][slowest]['node']} needs the longest"
    else:
        text += f"each step for another one (serialisation {factors.serialisation:.2f})"
    return text + "."


def _of_attempts(run: RunData) -> Iterator[Conclusion]:
    ended = [attempt for attempt in run.attempts if attempt.ended is not None]
    if not ended:
        return
    share = effective_time(run.attempts).share
    causes = ", ".join(str(attempt.cause.value) for attempt in ended if attempt.cause is not None)
    yield Conclusion(
        text=f"{share:.0%} of {len(ended)} attempts' time advanced the run (ends: {causes}).",
        source="attempts.jsonl", weight=4, kind="good" if share >= 0.9 else "problem",
    )  # fmt: skip


def _of_incidents(run: RunData) -> Iterator[Conclusion]:
    names = {
        "slow": "slow ranks, nodes or links were reported",
        "loss_jump": "steps were dropped because their loss jumped or was not finite",
        "roll_back": "roll-backs to a checkpoint",
        "out_of_memory": "times a rank ran out of memory",
        "damage": "damaged blocks of data were met",
    }
    for kind, what in names.items():
        count = sum(record["kind"] == kind for record in run.incidents)
        if count:
            yield Conclusion(
                text=f"{count} {what}.", source=f"records {kind} in metrics/", weight=1, kind="problem"
            )


def _ranks(run: RunData) -> str:
    ranks, nodes = run.num_ranks, run.num_nodes
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0
