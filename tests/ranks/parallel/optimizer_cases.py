"""What one rank does in the tests of optimizers: a small model, trained by each of torch's in each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.comm import SerialWorld, World
from hpctrain.distributed import ParallelPlan
from hpctrain.errors import UsageError
from hpctrain.run import Session
from tests.sessions import session_over

STEPS, SAMPLES = 5, 13
NAMES = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
)
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "tensor": {"tensor": 2, "tensor_plan": {"blocks.*.up": "column", "blocks.*.down": "row"}},
}


class Block(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=bias), nn.Linear(8, 6, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Net(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=bias)
        self.blocks = nn.ModuleList(Block(bias=bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Table(nn.Module):
    """With sparse gradients. Its inputs are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(7, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, bag = (block(rows) for block, rows in zip(self.blocks, (x[:, 0] % 7, x % 9), strict=True))
        return one * bag


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = Table() if name == "SparseAdam" else Net(bias=name != "Muon")
    return model.double()


def options_of(name: str) -> dict[str, Any]:
    return {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}


def trained(session: Session, name: str, layout: str, **options: Any) -> list[torch.Tensor] | str:
    """Returns the parameters, whole, or the words of a refusal when the model is split or the updater is made."""
    world, model = session.world, model_of(name)
    try:
        if layout != "none":
            session.parallelize(model, ParallelPlan(**PLANS[layout]))
        optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=0.01, **options_of(name))
        updater = session.distributed_optimizer(
            model, optimizer, algorithm="direct" if layout == "none" else "auto", **options
        )
    except UsageError as error:
        return str(error)
    split = 1 if layout == "tensor" else world.num_ranks
    rank = 0 if layout == "tensor" else world.rank
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        if name == "SparseAdam":
            x = torch.randint(0, 63, (SAMPLES, 3), generator=generator)
        else:
            x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
        mine = x.tensor_split(split)[rank]
        if step == 2:  # all samples are another rank's
            mine = x if rank == 0 else x[:0]
        if len(mine) or layout != "none":
            loss = model(mine).square().sum() / max(1, len(mine))
            updater.backward(loss, weight=len(mine) / SAMPLES)
        assert updater.step().applied
    updater.wait_for_parameters()
    whole = [getattr(p.detach(), "full_tensor", p.detach().clone)() for p in model.parameters()]
    updater.close()
    return whole


def everything(world: World) -> dict[str, dict[str, str]]:
    """Returns by optimizer and layout `equal` to one process, `differs by ...`, or the refusal. Collective."""
    found: dict[str, dict[str, str]] = {}
    sessions = {layout: session_over(world) for layout in PLANS}
    alone_session = session_over(SerialWorld())
    for name in NAMES:
        alone = trained(alone_session, name, "none")
        found[name] = {}
        for layout in PLANS:
            together = trained(sessions[layout], name, layout)
            found[name][layout] = together if isinstance(together, str) else _compared(together, alone)
    return found


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the table of the guide. found: of `everything`."""
    lines = [
        '| | whole copies | `shard = "optimizer"` | `"gradients"` | `"parameters"` | `tensor = 2` |',
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, results in found.items():
        lines.append(f"| {name} | " + " | ".join(_in_short(results[layout]) for layout in PLANS) + " |")
    return "\n".join(lines)


def _in_short(result: str) -> str:
    if result == "equal":
        return "equal"
    return "rounded" if result.startswith("differs by") else "refused"


def _compared(found: list[torch.Tensor], wanted: list[torch.Tensor] | str) -> str:
    assert not isinstance(wanted, str)
    pairs = zip(found, wanted, strict=True)
    most = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return "equal" if most < 1e-10 else f"differs by {most:.2g}"
