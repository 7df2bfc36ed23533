"""What ranks do in test_drift: steps of an updater of each kind, with and without something that makes ranks differ."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.distributed import ParallelPlan
from hpctrain.errors import RanksDiffer
from hpctrain.run import Session
from tests.sessions import session_over

STEPS = 12


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return made


def drift(world: World, algorithms: list[list[str]], shards: list[str]) -> dict[str, Any]:
    """Returns what each case came to, by name."""
    found = {}
    with session_over(world) as session:
        for algorithm, wire in algorithms:
            for what in ("nothing", "bias", "lr"):
                found[f"{algorithm} {wire} {what}"] = _train(session, what, algorithm=algorithm, wire=wire)
        for shard in shards:
            for what in ("nothing", "lr"):
                found[f"{shard} {what}"] = _train(session, what, shard=shard)
    return found


def _train(
    session: Session, what: str, *, algorithm: str = "auto", wire: str = "fp32", shard: Any = "none"
) -> list[Any]:
    """Returns the step of the error (0: none) and its text, whether the statistics were finite after each step, and
    which steps were applied. In step 3 the last rank has an infinite sample, in step 5 it does what `what` says."""
    split = session.parallelize(model(), ParallelPlan(shard=shard))
    optimizer = torch.optim.SGD(split.parameters(), 0.1)
    updater = session.updater(split, optimizer, algorithm=algorithm, wire=wire)
    last = session.rank == session.num_ranks - 1
    finite, applied = [], []
    try:
        for step in range(1, STEPS + 1):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + session.rank))
            if last and step == 3:
                x[1, 2] = torch.inf
            if last and step == 5 and what == "bias":
                split[2].bias.data[1] += 0.5  # type: ignore[index, operator]
            if last and step == 5 and what == "lr":
                optimizer.param_groups[0]["lr"] = 0.05
            updater.backward(split(x).square().mean(), weight=1 / session.num_ranks)
            outcome = updater.step(sums={"one": 1.0})
            assert outcome.sums == {"one": session.num_ranks}
            applied.append(outcome.applied)
            finite.append(bool(split.state_dict()["1.running_mean"].isfinite().all()))
    except RanksDiffer as error:
        return [step, str(error), finite, applied]
    finally:
        updater.close()
    return [0, "", finite, applied]
