"""What one rank does in the tests of replicas that differ. Runs inside a launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.checkpoint import Replicated, Saver, State, load, save, saving_into
from hpctrain.comm import World, all_gather_json
from hpctrain.errors import CheckpointError, HpctrainError, RanksDiffer, UsageError
from hpctrain.train.state.training_state import Position, TrainingState
from tests.ranks.checkpoint_tiers.tiers_cases import open_tiers
from tests.ranks.train.training_cases import Classifier, train
from tests.sessions import session_over
from tests.unit.checkpoint.states import same_bits


def everything(world: World, directory: str) -> dict[str, Any]:
    """All cases of one launch."""
    where = Path(directory) / f"{world.num_ranks}"
    return {
        "buffers": mixed_buffers(world, where / "buffers"),
        "drift": drifted(world, where / "drift"),
        "training": trained(world, where / "training", data=Path(directory) / "data"),
    }


def rank_0s(world: World, tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().reshape(-1).clone().view(torch.uint8)
    world.broadcast(data, root=0)
    return data.view(tensor.dtype).reshape(tensor.shape)


# ---------------------------------------------------------------------- buffers that differ


def normed() -> nn.Sequential:
    """Four layers of batch normalisation. Were all of it written in equal parts, then on 2 and 3 ranks two of them
    would meet inside a running mean or variance of 8 KiB."""
    torch.manual_seed(3)
    wide = [nn.BatchNorm1d(2048) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2048), *wide)


def mixed_buffers(world: World, where: Path) -> dict[str, Any]:
    """An own loop, saved in every way. Of each way the entries that are not rank 0's, to the bit."""
    model = normed()
    session = session_over(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updater = session.distributed_optimizer(model, optimizer)
    torch.manual_seed(100 + world.rank)
    for _ in range(3):
        updater.backward(model(torch.randn(16, 4) + world.rank).square().mean(), weight=1 / world.num_ranks)
        updater.step()
    expected = {name: rank_0s(world, tensor) for name, tensor in model.state_dict().items()}
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_different = sum(not same_bits(own[name], tensor) for name, tensor in expected.items())
    state = TrainingState(model, optimizer, updater, 0)
    captured = state.capture(Position(step=3), comm=world, identity={})
    tiers = open_tiers(world, str(where), ranks_per_node=1)

    def in_background() -> Path:
        paths = []
        begin = saving_into(where / "background", comm=world)
        with Saver(begin, comm=world, mode="async", on_saved=lambda saved: paths.append(saved.path)) as saver:
            saver.save(state.capture(Position(step=3), comm=world, identity={}), step=3)
            for tensor in model.state_dict().values():
                tensor.zero_()  # the next step has changed everything
        for name, tensor in model.state_dict().items():
            tensor.copy_(own[name])
        return paths[0]

    ways: dict[str, Callable[[], Path]] = {
        "direct": lambda: (
            save(captured, directory=where / "direct", step=3, comm=world, engine="direct").path
        ),
        "mpio": lambda: save(captured, directory=where / "mpio", step=3, comm=world, engine="mpio").path,
        "folder": lambda: save(captured, directory=where / "folder", step=3, comm=world, files=2).path,
        "background": in_background,
        "two tiers": lambda: tiers.begin_save(captured, step=3, comm=world).finish().path,
    }
    wrong = {}
    for way, save_it in ways.items():
        _, tensors = load(save_it(), comm=world)
        wrong[way] = [
            name for name, tensor in expected.items() if not same_bits(tensors[f"model/{name}"], tensor)
        ]
    touched = [name for name, tensor in model.state_dict().items() if not same_bits(tensor, own[name])]
    tiers.close()
    updater.close()
    return {"different": num_different, "wrong": wrong, "touched": touched}


# ---------------------------------------------------------------------- replicas that drifted


def reported(
    world: World, save_it: Callable[[], Any], error: type[HpctrainError] = CheckpointError
) -> list[str]:
    """Every rank's error, "" where it had none."""
    text = ""
    try:
        save_it()
    except error as found:
        text = str(found)
    return all_gather_json(world, text)


def drifted(world: World, where: Path) -> dict[str, Any]:
    """A parameter of the last rank is another one's. What the ranks are told, by how they compare."""
    world.barrier()
    model = normed().requires_grad_(False)
    items = [Replicated(name=name, tensor=tensor) for name, tensor in model.named_parameters()]
    state = State(items=items)

    def save_it(step: int, **options: Any) -> Any:
        return save(state, directory=where, step=step, comm=world, keep=None, **options)

    found: dict[str, Any] = {"same": reported(world, lambda: save_it(1))}
    if world.rank == world.num_ranks - 1:
        model[2].weight += 0.25
    found["sampled"] = reported(world, lambda: save_it(2))
    found["full"] = reported(world, lambda: save_it(2, replica_check="full"))
    found["background"] = reported(world, lambda: in_background(state, where, world=world))
    found["off"] = reported(world, lambda: save_it(3, replica_check="off"))
    notes: list[str] = []
    found["rank0"] = reported(world, lambda: notes.append(save_it(4, on_replica_mismatch="rank0").note))
    found["note"] = notes
    expected = {name: rank_0s(world, tensor) for name, tensor in model.named_parameters()}
    if world.rank == world.num_ranks - 1:
        model[2].weight -= 0.25
        model[2].weight[1000, 3] += 3e-7
    found["one element, full"] = reported(world, lambda: save_it(5, replica_check="full"))
    statistics = State(
        items=[Replicated(name=name, tensor=b + world.rank) for name, b in model.named_buffers()]
    )
    found["statistics"] = reported(world, lambda: save(statistics, directory=where, step=6, comm=world))
    found["settings"] = reported(
        world, lambda: save_it(7, replica_check=("off", "full")[world.rank % 2]), UsageError
    )
    _, tensors = load(where / "step-00000004.h5", comm=world)
    found["wrong"] = [name for name, tensor in expected.items() if not same_bits(tensors[name], tensor)]
    found["saved"] = sorted(path.name for path in where.iterdir())
    return found


def in_background(state: State, where: Path, *, world: World) -> None:
    with Saver(saving_into(where, comm=world), comm=world, mode="async") as saver:
        saver.save(state, step=2)


# ---------------------------------------------------------------------- under training


class Normed(Classifier):
    """With running statistics, which are each rank's own until they are evaluated; and a parameter that can drift."""

    def __init__(self, *, drift_after: int = -1) -> None:
        super().__init__()
        self.drift_after = drift_after

    def build_model(self) -> nn.Module:
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 10)
        )
        return self.model

    def loss(self, model: nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(model, fields)
        if self.steps == self.drift_after:
            with torch.no_grad():
                model[1].bias += 0.5
        return loss


def trained(world: World, where: Path, *, data: Path) -> dict[str, Any]:
    """Never stopped and stopped in between: the same bits. And a run in which a parameter of rank 1 drifts."""
    options: dict[str, Any] = {
        "run": {"steps": 14}, "data": {"train": str(data), "held_out": str(data)},
        "reduction": {"algorithm": "flat"}, "checkpoint": {"every_steps": 5},
    }  # fmt: skip
    whole = train(world, where, "whole", task=Normed(), **options)
    stop_after = 8 if world.rank == world.num_ranks - 1 else 0
    train(world, where, "run", task=Normed(), stop_after=stop_after, **options)
    resumed = train(world, where, "run", task=Normed(), resume="auto", **options)

    def drifts(name: str, **more: Any) -> Callable[[], Any]:
        task = Normed(drift_after=7 if world.rank == 1 else -1)
        return lambda: train(world, where, name, task=task, **options, **more)

    drift = reported(world, drifts("drift", guards={"compare_ranks": "off"}))
    in_step = reported(world, drifts("in-step"), error=RanksDiffer)
    return {
        "same": resumed["losses"] == whole["losses"] and resumed["fingerprint"] == whole["fingerprint"],
        "resumed_from": resumed["summary"]["resumed_from"],
        "drift": drift,
        "in step": in_step,
        "left": sorted(path.name for path in (where / "drift" / "checkpoints").glob("step-*")),
    }
