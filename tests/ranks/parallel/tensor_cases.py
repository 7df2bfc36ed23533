"""What one rank does in the tests of tensor parallelism: a small language model in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World, all_gather_json
from hpctrain.distributed import ParallelPlan, local_part
from hpctrain.tasks.characters import Characters
from hpctrain.train import Fields, Position
from tests.ranks.parallel.parallel_cases import LATER, train
from tests.sessions import session_over

TENSOR = {"tensor": 2}
SHARDED = {"tensor": 2, "shard": "parameters"}
BY_NODE = {"tensor": 2, "shard": "parameters", "shard_within": "node", "activation_checkpointing": "blocks"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}, "reference": {}},
    2: {
        "tensor": TENSOR,
        "sharded": SHARDED,
        "checkpointing": TENSOR | {"activation_checkpointing": "blocks"},
    },
    4: {"tensor": TENSOR, "sharded": SHARDED, "by node": BY_NODE, "tensor of four": {"tensor": 4}},
}
# Runs that are continued on other ranks: by the ranks, the run and the layout that goes on. First those of the same
# launch as the trainings on 4 ranks, then those that continue what 4 ranks have saved.
CONTINUED: dict[int, list[tuple[str, dict[str, Any]]]] = {
    4: [("1-none", SHARDED), ("2-tensor", {"shard": "parameters"}), ("2-sharded", TENSOR)],
    2: [("4-sharded", {}), ("4-tensor of four", TENSOR)],
    1: [("4-tensor", {})],
}


class Sentences(Characters):
    """Characters of which 10 exist. Of a vocabulary that is split too, each of two ranks has 5 rows, which two
    data-parallel ranks then share unevenly. overflow: the gradients of sample 7 overflow in float16."""

    def __init__(
        self, *, splits_vocabulary: bool = True, overflow: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(window=5, vocabulary=10, width=8, layers=2, heads=4, dropout=dropout)
        self.splits_vocabulary, self.overflow = splits_vocabulary, overflow

    def tensor_plan(self) -> dict[str, str | tuple[str, int]]:
        more = {"tokens": "row", "head": "column-gathered"} if self.splits_vocabulary else {}
        return {**super().tensor_plan(), **more}

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        loss = super().loss(model, fields)
        return loss * 1e36 if self.overflow and 7 in fields["id"] else loss

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats": float(super().loss(model, fields))}


def nodes_of(layout: dict[str, Any], num_ranks: int) -> list[str]:
    """Two nodes where a tensor group fits into each."""
    split = num_ranks == 4 and layout.get("tensor", 1) < 4
    return ["a", "a", "b", "b"] if split else ["a"] * num_ranks


def run(world: World, where: Path, name: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    nodes = nodes_of(layout, world.num_ranks)
    task = more.pop("task", None) or Sentences(splits_vocabulary=layout.get("tensor") != 4)
    return train(world, where, name, layout, task=task, nodes=nodes, **more)


def trained(world: World, directory: str) -> dict[str, Any]:
    """Trains in all layouts of so many ranks; 4 ranks continue what fewer have saved."""
    where, size = Path(directory), world.num_ranks
    found = {name: run(world, where, f"{size}-{name}", layout) for name, layout in LAYOUTS[size].items()}
    if size == 1:
        found["later"] = run(world, where, "1-later", {}, steps=LATER)
    if size <= 2:
        found["fp16"] = run(
            world, where, f"{size}-fp16", TENSOR if size == 2 else {}, precision="fp16",
            task=Sentences(overflow=True), guards={"loss_jump_z": 0.0},
        )  # fmt: skip
        found["own loop"] = own_loop(world, where, tensor=size, name=f"{size}-own")
    if size == 4:
        found |= continued(world, directory)
        found["own loop"] = own_loop(world, where, tensor=2, name="2-own")
    return found


def continued(world: World, directory: str) -> dict[str, Any]:
    return {
        name: run(world, Path(directory), name, layout, steps=LATER)
        for name, layout in CONTINUED[world.num_ranks]
    }


def own_loop(world: World, where: Path, *, tensor: int, name: str) -> dict[str, Any]:
    """Six steps, an epoch; the last has one sample. Continues what it finds in `name`."""
    session, task = session_over(world), Sentences(dropout=0.0)
    torch.manual_seed(1)
    model = task.build_model().double()
    if tensor > 1:
        session.parallelize(model, ParallelPlan(tensor=tensor, tensor_plan=task.tensor_plan()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updater = session.updater(model, optimizer, clip_norm=0.3)
    loader = session.loader(session.open_dataset(where / "data"), global_batch=12, seed=1)
    position = session.load_state(where / name, updater, loader=loader)
    drawn = all_gather_json(world, float(torch.rand(())))
    steps = []
    with loader.epoch(position.epoch) as batches:
        for batch in batches:
            loss = task.loss(model, batch.fields)
            if batch.global_samples == 12:
                loss.backward()  # shares of equal size
            else:
                updater.backward(loss, weight=batch.weight)
            counted = (
                float(loss.detach()) * batch.weight
                if session.axes.counts_samples and batch.num_samples
                else 0.0
            )
            outcome = updater.step(sums={"loss": counted})
            steps.append([outcome.sums["loss"], outcome.grad_norm])
            position = position.after(batch)
    session.save_state(
        where / name, updater, Position(step=position.step, epoch=position.epoch + 1), loader=loader
    )
    norms = [local_part(p.detach()) for n, p in model.named_parameters() if n.endswith("norm.weight")]
    alike = all_gather_json(world, [part.tolist() for part in norms])
    return {"steps": steps, "drawn": drawn, "alike": all(found == alike[0] for found in alike)}
