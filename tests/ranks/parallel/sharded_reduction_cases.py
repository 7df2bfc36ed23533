"""What one rank does in the tests of sharded models whose gradients are summed in other ways, and of their edges."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain import ParallelPlan, Position
from hpctrain.comm import Collective, World
from hpctrain.distributed import (
    CollectiveWork,
    OperationThread,
    group_traffic,
    local_part,
    sum_gradients_by,
)
from hpctrain.errors import DataError, UsageError
from hpctrain.run import Session
from hpctrain.train.task.task import Fields
from tests.ranks.parallel.layouts import (
    NODES,
    STEPS as MANY,
    Family,
    Found,
    Launch,
    Layout,
    data_section,
    train,
)
from tests.ranks.parallel.parallel_cases import NODE, WORLD, Layers, train_layers
from tests.ranks.parallel.sharded_passes_cases import passes
from tests.sessions import session_over

STEPS = 3
# name: layout, [reduction]. Ranks 3 are on unequal nodes, 4 on two nodes of two ranks.
Runs = dict[str, tuple[Layout, dict[str, str]]]
DIRECT = {"algorithm": "direct"}
LEVELS = {"algorithm": "hierarchical"}
EXACT: dict[int, Runs] = {
    1: {"none": ({}, {})},
    2: {"no levels": (WORLD, LEVELS), "node": (NODE, LEVELS)},
    3: {"direct": (WORLD, DIRECT), "hierarchical": (WORLD, LEVELS)},
    4: {"direct": (WORLD, DIRECT), "hierarchical": (WORLD, LEVELS), "node": (NODE, LEVELS)},
}  # fmt: skip
# In float32, against FSDP2's own sums.
ENCODED: dict[int, Runs] = {
    2: {
        "own": (WORLD, {}),
        "fp16": (WORLD, {"wire": "fp16"}),
        "bf16": (WORLD, {"wire": "bf16"}),
        "int8": (WORLD, {"wire": "int8"}),
    },
    3: {"own": (WORLD, {}), "int8": (WORLD, LEVELS | {"wire": "int8"})},
    4: {
        "own": (WORLD, {}),
        "hierarchical": (WORLD, LEVELS),
        "fp16": (WORLD, LEVELS | {"wire": "fp16"}),
        "node int8": (NODE, {"wire": "int8"}),
    },
}


class Overflowing(Layers):
    """The gradients of sample 7 overflow in float16, not in float32."""

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        loss = super().loss(model, fields)
        return loss * 1e7 if 7 in fields["id"] else loss


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(96), nn.Linear(96, 96)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


def wide_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*(Wide() for _ in range(3)))


def one_step(session: Session, plan: ParallelPlan, **reduction: str) -> tuple[int, list[float]]:
    """Returns the bytes that this rank sends to others in a step, and the gradients' norm and loss."""
    model = session.parallelize(wide_model(), plan)
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **reduction)  # type: ignore[arg-type]
    inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(session.rank))
    traffic = group_traffic()
    assert traffic is not None
    before = traffic.num_bytes()
    loss = model(inputs).square().mean()
    updater.backward(loss, weight=1 / session.world_size)
    norm = updater.step().grad_norm
    return traffic.num_bytes() - before, [norm, float(loss.detach())]


def sent(world: World) -> dict[str, Any]:
    """Bytes of a step by wire format, each rank on a node of its own, and what is expected of its gradients."""
    size = world.num_ranks
    session = session_over(world, nodes=[str(rank) for rank in range(size)])
    parts = [
        sum(math.ceil(p.shape[0] / size) * p[0].numel() for p in block.parameters())
        for block in wide_model().children()
    ]
    found: dict[str, Any] = {"gradients": 4 * sum(parts) * (size - 1)}
    for wire in ("fp32", "fp16", "bf16", "int8"):
        found[wire] = one_step(session, ParallelPlan(shard="parameters"), wire=wire)
    found["direct"] = one_step(session, ParallelPlan(shard="parameters"), algorithm="direct")
    nodes = ParallelPlan(shard="parameters", shard_within="node")
    found["refused"] = [
        refusal(lambda: one_step(session, ParallelPlan(shard="parameters"), algorithm="ring")),
        refusal(lambda: one_step(session, nodes, algorithm="direct")),
        refusal(lambda: one_step(session, nodes, wire="int8")),
        refused_own_sharding(session),
    ]
    torch.distributed.destroy_process_group()
    return found


def refusal(call: Any) -> str:
    try:
        call()
    except (UsageError, DataError) as error:
        return str(error) if error.agreed else f"not agreed: {error}"
    return ""


def refused_own_sharding(session: Session) -> str:
    """What `updater` says to a model that the program itself has sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = wide_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (session.world_size,)))
    return refusal(lambda: session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def slow_sums(session: Session) -> dict[str, Any]:
    """Two plain backwards while sums take 50 ms: the gradients that they leave, and how many sums had ended when each
    began. At the end what one process computes."""
    size = session.world_size
    model = session.parallelize(wide_model(), ParallelPlan(shard="parameters"))
    comm, thread = session.world.duplicate(), OperationThread("slow")
    begun: list[int] = []
    ended: list[bool] = []

    def start(values: torch.Tensor, *, out: torch.Tensor, group: Any) -> CollectiveWork:
        begun.append(len(ended))

        def add() -> None:
            time.sleep(0.05)
            out.copy_(comm.reduce_scatter(values, counts=[out.numel()] * size))
            ended.append(True)

        return thread.run(add, [out], behind=True)

    with torch.no_grad():
        model(torch.zeros(1, 96))  # FSDP2 keeps some parameters whole
    sum_gradients_by(start, model)
    inputs = [torch.randn(4, 96, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    found: dict[str, Any] = {"begun": begun}
    for name in ("once", "twice"):
        model(inputs[session.rank]).square().mean().backward()
        local = [p.grad.to_local().clone() for p in model.parameters()]  # before anything else waits
        found[name] = [gathered(comm, part).tolist() for part in local]
    alone = wide_model()
    sum(alone(values).square().mean() for values in inputs).backward()
    found["alone"] = [p.grad.flatten().tolist() for p in alone.parameters() if p.grad is not None]
    return found


class Backwards(nn.Module):
    """Calls its blocks in reverse: the first to run is gathered ahead once more when the second runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


def changed_between_forwards(session: Session) -> list[list[float]]:
    """Outputs without gradients after the parameters were doubled, sharded and in one process."""
    found = []
    inputs = torch.randn(2, 96, generator=torch.Generator().manual_seed(4))
    for shards in (True, False):
        torch.manual_seed(6)
        model: nn.Module = Backwards()
        if shards:
            session.parallelize(model, ParallelPlan(shard="parameters"))
        parameters = list(model.parameters())
        with torch.no_grad():
            model(inputs)
            for parameter in parameters:
                local_part(parameter).mul_(2)
            found.append(model(inputs).flatten().tolist())
    return found


def gathered(comm: Collective, part: torch.Tensor) -> torch.Tensor:
    """Returns the elements of all ranks' parts, shape (n,)."""
    counts = comm.all_gather(torch.tensor([part.numel()]), counts=[1] * comm.num_ranks).tolist()
    return comm.all_gather(part.flatten(), counts=counts)


def load_after_evaluation(session: Session, directory: Path) -> list[float]:
    """Losses of an own loop: twice the same step, from a state that was loaded after an evaluation in between."""
    model = session.parallelize(wide_model(), ParallelPlan(shard="parameters"))
    updater = session.distributed_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    inputs = torch.randn(4, 96, generator=torch.Generator().manual_seed(9 + session.rank))

    def step() -> float:
        loss = model(inputs).square().mean()
        updater.backward(loss, weight=1 / session.world_size)
        updater.step()
        return float(loss.detach())

    step()
    session.save_state(directory, updater, Position(step=1))
    losses = [step(), step()]
    with torch.no_grad():
        losses.append(float(model(inputs).square().mean()))  # FSDP2 keeps what it has gathered
    assert session.load_state(directory, updater).step == 1
    return [*losses, step(), step(), float(model(inputs).square().mean().detach())]


def everything(world: World, where: Path) -> Found:
    """All cases of one launch, after those of the bytes that are sent."""
    size = world.num_ranks
    found: Found = {"sent": sent(world)} if size > 1 else {}
    for precision, runs in (("fp64", EXACT), ("fp32", ENCODED)):
        for name, (layout, reduction) in runs.get(size, {}).items():
            found[f"{precision} {name}"] = train_layers(
                world, where, f"{size}-{precision}-{name}", layout, steps=STEPS, precision=precision,
                reduction=reduction,
            )  # fmt: skip
    if size == 2:
        for wire in ("fp32", "fp16"):
            found[f"overflow {wire}"] = train(
                world, where, f"overflow-{wire}", WORLD, steps=MANY, precision="fp32", task=Overflowing(),
                reduction={"wire": wire}, guards={"loss_jump_z": 0.0},
            )  # fmt: skip
    if size == 4:
        session = session_over(world, nodes=NODES[size])
        nodes = ParallelPlan(shard="parameters", shard_within="node")
        found["between nodes"] = [one_step(session, nodes, wire=wire) for wire in ("fp32", "int8")]
    if size in (1, 3):
        session = session_over(world, nodes=NODES[size])
        if size == 3:
            found["after evaluation"] = load_after_evaluation(session, where / "own")
            found["slow sums"] = slow_sums(session)
            found["changed"] = changed_between_forwards(session)
            found["passes"] = passes(session)
        first = where / "1-fp64-none" / "checkpoints"
        found["from weights"] = train_layers(
            world, where, f"{size}-from-weights", WORLD if size == 3 else {}, steps=3,
            checkpoint={"weights_from": str(first)},
        )  # fmt: skip
        few = data_section(where, WORLD, held_out="few")
        found["few"] = refusal(lambda: train_layers(world, where, f"{size}-few", WORLD, steps=2, data=few))
    return found


FAMILY = Family(cases=__name__, launches=[Launch(ranks=ranks, more=everything) for ranks in (1, 2, 3, 4)])
