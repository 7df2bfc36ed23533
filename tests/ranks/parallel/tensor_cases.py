"""A small language model whose layers are split over tensor groups, in several layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from hpctrain.comm import World, all_gather_json
from hpctrain.distributed import ParallelPlan, local_part
from hpctrain.errors import UsageError
from hpctrain.reduce.split_models import tensor_gradients as early_sums
from hpctrain.tasks.characters import Characters
from hpctrain.train import Fields, Position
from tests.ranks.parallel.layouts import Family, Found, Launch, Layout, train
from tests.sessions import session_over

TENSOR = {"tensor": 2}
SHARDED = {"tensor": 2, "shard": "parameters"}
BY_NODE = {"tensor": 2, "shard": "parameters", "shard_within": "node", "activation_checkpointing": "blocks"}
SEQUENCE = {"tensor": 2, "sequence": True}


class Sentences(Characters):
    """Characters of which 10 exist. Of a vocabulary that is split too, each of two ranks has 5 rows, which two
    data-parallel ranks then share unevenly. overflow: the gradients of sample 7 overflow in float16. drops: the blocks
    end with dropout."""

    def __init__(
        self, *, splits_vocabulary: bool = True, overflow: bool = False, drops: bool = False
    ) -> None:
        super().__init__(window=4, vocabulary=10, width=8, layers=2, heads=4)
        self.splits_vocabulary, self.overflow, self.drops = splits_vocabulary, overflow, drops

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        for block in model.blocks if self.drops else ():
            block.feed_forward.append(torch.nn.Dropout(0.3))
        return model

    def tensor_plan(self) -> dict[str, str | tuple[str, int]]:
        more = {"tokens": "row", "head": "column-gathered"} if self.splits_vocabulary else {}
        drops = {"blocks.*.feed_forward.3": "sequence"} if self.drops else {}
        return {**super().tensor_plan(), **more, **drops}

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        loss = super().loss(model, fields)
        return loss * 1e36 if self.overflow and 7 in fields["id"] else loss

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats": float(super().loss(model, fields))}


def nodes_of(layout: Layout, num_ranks: int) -> list[str]:
    """Two nodes where a tensor group fits into each."""
    split = num_ranks == 4 and layout.get("tensor", 1) < 4
    return ["a", "a", "b", "b"] if split else ["a"] * num_ranks


def run(world: World, where: Path, name: str, layout: Layout, **more: Any) -> Found:
    early_sums._LEAST_BUCKET_BYTES = 1  # so that these small models have several buckets
    nodes = nodes_of(layout, world.num_ranks)
    # 10 characters are not over four ranks; the built-in plan does not split them over two either.
    whole = layout.get("tensor") == 4 or layout == SEQUENCE
    task = more.pop("task", None) or Sentences(splits_vocabulary=not whole)
    return train(world, where, name, layout, task=task, nodes=nodes, **more)


def on_one_or_two(world: World, where: Path) -> Found:
    size = world.num_ranks
    layout = SEQUENCE if size == 2 else {}
    found = {
        "drops": run(world, where, f"{size}-drops", layout, task=Sentences(drops=True)),
        "own loop": own_loop(world, where, tensor=size, name=f"{size}-own"),
    }
    return found if size == 1 else found | {"parts": parts_of_the_sequence(world)}


def on_four(world: World, where: Path) -> Found:
    return {
        "abandoned": abandoned_step(world),
        "hidden": hidden_gradients(world),
        "own loop": own_loop(world, where, tensor=2, name="2-own"),
    }


def own_loop(world: World, where: Path, *, tensor: int, name: str) -> dict[str, Any]:
    """Six steps, an epoch; the last has one sample. Continues what it finds in `name`."""
    session, task = session_over(world), Sentences()
    torch.manual_seed(1)
    model = task.build_model().double()
    if tensor > 1:
        session.parallelize(model, ParallelPlan(tensor=tensor, tensor_plan=task.tensor_plan()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updater = session.distributed_optimizer(model, optimizer, clip_norm=0.3)
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


def abandoned_step(world: World) -> dict[str, Any]:
    """Norms of a step after one that was given up with its sums begun, and of one that is the first; what is said of
    another backward after the last."""
    session, task = session_over(world, nodes=["a", "a", "b", "b"]), Sentences()
    tokens = torch.arange(20).view(4, 5) * (1 + session.axes.data.index) % 10
    norms, refused = [], []
    for gives_up in (True, False):
        torch.manual_seed(1)
        model = task.build_model().double()
        session.parallelize(model, ParallelPlan(tensor=2, tensor_plan=task.tensor_plan()))
        updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if gives_up:
            updater.backward(task.loss(model, {"tokens": tokens}), weight=0.5)
            for last in (True, False):
                try:
                    updater.backward(task.loss(model, {"tokens": tokens}), weight=0.5, last=last)
                except UsageError as error:
                    refused.append(str(error))
            updater.zero_grad()
        updater.backward(task.loss(model, {"tokens": tokens}), weight=0.5)
        norms.append(updater.step().grad_norm)
    return {"refused": refused, "norms": norms}


def hidden_gradients(world: World) -> dict[str, Any]:
    """What uses of gradients between backward and step raise, and the norms of steps of one backward and of two."""
    session, task = session_over(world, nodes=["a", "a", "b", "b"]), Sentences()
    tokens = torch.arange(20).view(4, 5) * (1 + session.axes.data.index) % 10
    torch.manual_seed(1)
    model = task.build_model().double()
    session.parallelize(model, ParallelPlan(tensor=2, tensor_plan=task.tensor_plan()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = session.distributed_optimizer(model, optimizer)
    parameters = list(model.parameters())
    uses: dict[str, Callable[[], object]] = {
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
        "clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(parameters, 0.1),
        "clone": lambda: [p.grad.clone() for p in parameters if p.grad is not None],
        "numpy": lambda: [p.grad.numpy() for p in parameters if p.grad is not None],
        "data": lambda: [p.grad.data.mul_(2.0) for p in parameters if p.grad is not None],
        "optimizer": optimizer.step,
        "synchronize": updater.synchronize,
    }

    def backward(how: str) -> None:
        loss = task.loss(model, {"tokens": tokens})
        if how == "plain":
            loss.backward()
        elif how == "create_graph":
            loss.backward(create_graph=True)
        else:
            updater.backward(loss, weight=0.5, last=how == "last")

    def norm() -> float:
        return updater.step().grad_norm

    raised, norms = {}, {}
    for how in ("plain", "last"):
        backward(how)
        for name, use in uses.items():
            raised[f"{name}, {how}"] = _raised(use)
        norms[how] = norm()
    for first, second in (("plain", "plain"), ("not last", "last"), ("not last", "not last")):
        backward(first)
        backward(second)
        norms[f"{first}, {second}"] = norm() / 2
    backward("plain")
    with updater.no_sync():
        backward("plain")
        norms["seen in no_sync"] = float(
            parameters[-1].grad is not None and torch.isfinite(parameters[-1].grad).all()
        )
    backward("plain")
    norms["no_sync"] = norm() / 3
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        for _ in range(2):
            backward("create_graph")
    raised["clone, create_graph"] = _raised(uses["clone"])
    norms["create_graph"] = norm() / 2
    backward("plain")
    optimizer.zero_grad()
    backward("plain")
    norms["dropped"] = norm()
    for how in ("plain", "last"):
        backward(how)
        parameters[0].grad = torch.zeros_like(parameters[0])
        raised[f"replaced, {how}"] = _raised(updater.step)
        updater.zero_grad()
    backward("last")
    optimizer.zero_grad()
    raised["dropped, last"] = _raised(updater.step)
    updater.zero_grad()
    backward("plain")
    norms["afterwards"] = norm()
    return {"raised": raised, "norms": norms}


def _raised(use: Callable[[], object]) -> str:
    try:
        use()
    except UsageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def parts_of_the_sequence(world: World) -> dict[str, Any]:
    """The shapes that layers have as input, of 3 samples, and what is said of a sequence that has no equal parts."""
    session, task = session_over(world), Sentences(splits_vocabulary=False)
    model = task.build_model().double()
    model.norm.bias.requires_grad_(False)
    session.parallelize(model, ParallelPlan(tensor=2, sequence=True, tensor_plan=task.tensor_plan()))
    shapes: dict[str, list[int]] = {}

    def note(name: str) -> Any:
        return lambda _, args: shapes.update({name: list(args[0].shape)})

    for name in ("blocks.0", "blocks.1", "norm", "head"):
        model.get_submodule(name).register_forward_pre_hook(note(name), prepend=True)
    with CommDebugMode() as counter:
        logits = model(torch.zeros(3, 4, dtype=torch.long))
        logits.sum().backward()
    sent = {str(kind).split(".")[-1]: count for kind, count in counter.get_comm_counts().items()}
    try:
        model(torch.zeros(3, 3, dtype=torch.long))
        refused = ""
    except UsageError as error:
        refused = str(error)
    return {
        "shapes": shapes, "logits": list(logits.shape), "refused": refused, "sent": sent,
        "trained": [model.norm.weight.requires_grad, model.norm.bias.requires_grad],
    }  # fmt: skip


# First the trainings, then on fewer ranks those that continue what 4 ranks have saved.
FAMILY = Family(
    cases=__name__,
    train=run,
    overflows={"task": Sentences(overflow=True)},
    reference="1-reference",
    launches=[
        Launch(ranks=1, layouts={"none": {}, "reference": {}}, overflowing={"none": {}}, more=on_one_or_two),
        Launch(
            ranks=2,
            layouts={
                "tensor": TENSOR,
                "sharded": SHARDED,
                "checkpointing": TENSOR | {"activation_checkpointing": "blocks"},
                "sequence": SEQUENCE,
                "sequence, sharded": SHARDED | SEQUENCE | {"activation_checkpointing": "selective"},
            },
            overflowing={"tensor": TENSOR, "sequence": SEQUENCE},
            more=on_one_or_two,
        ),
        Launch(
            ranks=4,
            layouts={
                "tensor": TENSOR,
                "sharded": SHARDED,
                "by node": BY_NODE,
                "tensor of four": {"tensor": 4},
                "sequence": SEQUENCE,
                "sequence, by node": BY_NODE | SEQUENCE,
                "sequence of four": {"tensor": 4, "sequence": True},
            },
            continued={"1-none": SHARDED, "2-tensor": {"shard": "parameters"}, "2-sharded": SEQUENCE},
            more=on_four,
        ),
        Launch(
            ranks=2, continued={"4-sharded": {}, "4-tensor of four": TENSOR, "4-sequence of four": TENSOR}
        ),
        Launch(ranks=1, continued={"4-tensor": {}, "4-sequence": {}}),
    ],
)
