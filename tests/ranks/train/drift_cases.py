"""What ranks do in test_drift: steps of an updater of each kind, with and without something that makes ranks differ."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.distributed import ParallelPlan, local_part
from hpctrain.errors import RanksDiffer
from hpctrain.run import Session
from tests.sessions import session_over

STEPS = 12


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(
        torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return made


# How the model is split over four ranks, on nodes of two.
SPLITS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "by node": {"shard": "parameters", "shard_within": "node"},
    "tensor": {"tensor": 2, "tensor_plan": {"1": "column", "3": "row"}},
}


def drift(world: World, algorithms: list[list[str]]) -> dict[str, Any]:
    """Returns what each case came to, by name."""
    found = {}
    with session_over(world, nodes=[f"n{rank // 2}" for rank in range(world.num_ranks)]) as session:
        for algorithm, wire in algorithms:
            for what in ("nothing", "bias", "lr"):
                found[f"{algorithm} {wire} {what}"] = _train(session, what, algorithm=algorithm, wire=wire)
        for name, split in SPLITS.items():
            for what in ("nothing", "lr", *(["part", "bias"] if name in ("by node", "tensor") else [])):
                found[f"{name} {what}"] = _train(session, what, split=split)
    return found


def _train(
    session: Session,
    what: str,
    *,
    algorithm: str = "auto",
    wire: str = "fp32",
    split: dict[str, Any] | None = None,
) -> list[Any]:
    """Returns the step of the error (0: none) and its text, whether the statistics were finite after each step, and
    which steps were applied. In step 3 the last rank has an infinite sample, in step 5 it does what `what` says."""
    plan = ParallelPlan(**(split or {}))
    net: Any = session.parallelize(model(), plan)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    updater = session.distributed_optimizer(net, optimizer, algorithm=algorithm, wire=wire)
    num_data, data_rank = session.world_size // plan.tensor, session.rank // plan.tensor
    last = session.rank == session.world_size - 1
    finite, applied = [], []
    try:
        for step in range(1, STEPS + 1):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + data_rank))
            if data_rank == num_data - 1 and step == 3:
                x[1, 2] = torch.inf
            if last and step == 5 and what == "bias":
                local_part(net[3].bias.data)[-1:] += 0.5
            if last and step == 5 and what == "part":
                local_part(net[1].weight.data)[0] += 0.5
            if last and step == 5 and what == "lr":
                optimizer.param_groups[0]["lr"] = 0.05
            updater.backward(net(x).square().mean(), weight=1 / num_data)
            outcome = updater.step(sums={"one": 1.0})
            assert outcome.sums == {"one": session.world_size}
            applied.append(outcome.applied)
            finite.append(bool(net.state_dict()["0.running_mean"].isfinite().all()))
    except RanksDiffer as error:
        return [step, str(error), finite, applied]
    finally:
        updater.close()
    return [0, "", finite, applied]
