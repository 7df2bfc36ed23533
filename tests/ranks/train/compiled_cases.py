"""What one rank does in the tests of `run.compile`. Runs inside a launch; the test file compares what it returns."""

from __future__ import annotations

import copy
import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.errors import StoppedEarly
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline
from hpctrain.resilience import StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.compiling import compile_pieces
from hpctrain.run.training import Resume, carry_out
from hpctrain.telemetry import read_records
from tests.ranks.train.training_cases import GLOBAL_BATCH, Classifier
from tests.sessions import session_over

STEPS = 33  # the last batch of the epoch, which is smaller, is step 29
STOP_AFTER = 31


class Block(torch.nn.Module):
    """A residual block with buffers that forward changes."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.dropout = torch.nn.Dropout(dropout)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.dropout(torch.tanh(self.up(self.norm(hidden)))))


class Residual(Classifier):
    """A classifier of digits with two blocks."""

    def build_model(self) -> torch.nn.Module:
        self.model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), Block(32, dropout=self.dropout),
            Block(32, dropout=self.dropout), torch.nn.Linear(32, 10),
        )  # fmt: skip
        return self.model


class Hanging(Residual):
    """A task whose loss may take too long."""

    hangs = False

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.hangs:
            time.sleep(600)
        return super().loss(model, fields)


def trained(
    world: World, directory: Path, name: str, *, compiled: bool, dropout: float = 0.0, resume: str = "never",
    stop_after: int = 0, **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One run on one node; what it left behind. stop_after: the run is stopped after this step (0: it is not)."""
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory / name), "steps": STEPS, "seed": 5, "compile": compiled},
        "task": {"target": "tests:Residual"},
        "data": {
            "train": str(directory / "data"), "held_out": str(directory / "data"), "global_batch": GLOBAL_BATCH,
            "evaluation_batch": GLOBAL_BATCH, "evaluation_samples": GLOBAL_BATCH,
        },
        "optimizer": {"name": "adamw", "lr": 2e-3, "schedule": "cosine", "warmup_steps": 5},
        "reduction": {"algorithm": "flat", "bucket_mb": 0.004},
        "telemetry": {"evaluate_every_steps": 12},
        **sections,
    }  # fmt: skip
    task = Residual(dropout=dropout)
    session = session_over(world)
    stop = StopRequest()
    if stop_after:
        task.stop = stop
        task.stop_after = stop_after + int(compiled)  # the first loss of a compiled run is not a step
    summary: dict[str, Any] = {}
    try:
        summary = carry_out(
            parse_recipe(document), task, session=session, resume=Resume.parse(resume), stop=stop
        )
    except StoppedEarly as stopped:
        summary = {"stopped": str(stopped)}
    records = list(read_records(directory / name / "metrics" / f"rank-{world.rank:05}.jsonl"))
    return {
        "losses": [r["loss"] for r in records if r["kind"] == "step"],
        "fingerprint": task.fingerprint(),
        "names": sorted(task.model.state_dict()),
        "parameters": torch.cat([p.detach().double().flatten() for p in task.model.parameters()]).tolist(),
        "means": [b.tolist() for n, b in task.model.named_buffers() if n.endswith("running_mean")],
        "summary": summary,
    }


def last_compiled(loss: torch.Tensor) -> Any:
    """Returns the node of the autograd graph whose compiled backward runs last."""
    found, nodes = None, [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if "Compiled" in type(node).__name__:
            found = node
        nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def order_of_backward(world: World) -> list[str]:
    """Returns what happens in backward: "bucket 0", ..., when these are given to the reduction, and "first block"
    when the backward of the first block begins, which is the last compiled code of backward.
    """
    task = Residual()
    torch.manual_seed(3)
    model = task.build_model()
    events: list[str] = []
    compile_pieces(model)
    session = session_over(world)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    updater = session.distributed_optimizer(model, sgd, algorithm="flat", bucket_bytes=4_000)
    submit = ReductionPipeline.submit

    def observed(self: ReductionPipeline, number: int) -> None:
        events.append(f"bucket {number}")
        submit(self, number)

    ReductionPipeline.submit = observed  # type: ignore[method-assign]
    try:
        rows = GLOBAL_BATCH // world.num_ranks
        fields = {
            "image": torch.rand(rows, 1, 8, 8),
            "label": torch.zeros(rows, dtype=torch.int64),
            "id": torch.arange(rows),
        }
        for _ in range(2):  # in the second step the buckets are in the order of the gradients
            events.clear()
            loss = task.loss(model, fields)
            last_compiled(loss).register_prehook(lambda gradients: events.append("first block"))
            updater.backward(loss, weight=1 / world.num_ranks)
            updater.step()
    finally:
        ReductionPipeline.submit = submit  # type: ignore[method-assign]
        updater.close()
    return events


def copies() -> dict[str, bool]:
    """Returns whether a copy and a pickle of a compiled model compute with their own parameters."""
    model = Residual().build_model().eval()
    compile_pieces(model)
    found = {}
    with torch.no_grad():
        for name, other in (("copy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
            images = torch.rand(4, 64)
            same = torch.allclose(other(images), model(images), atol=1e-5)
            other[2].up.weight.fill_(5.0)
            found[name] = same and not torch.allclose(other(images), model(images), atol=1e-5)
    return found


def everything(world: World, directory: str) -> dict[str, Any]:
    where = Path(directory)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(where / "cache")
    n = world.num_ranks
    dropout = 0.3 if n == 1 else 0.0
    found: dict[str, Any] = {
        "eager": trained(world, where, f"{n}-eager", compiled=False),
        "compiled": trained(world, where, f"{n}-compiled", compiled=True),
    }
    found["whole"] = (
        trained(world, where, f"{n}-whole", compiled=True, dropout=dropout) if dropout else found["compiled"]
    )
    for name, then_compiled in (("resumed", True), ("then eager", False)):
        run = f"{n}-{name}"
        of_both = {"dropout": dropout if then_compiled else 0.0}
        trained(world, where, run, compiled=True, stop_after=STOP_AFTER, **of_both)
        found[name] = trained(world, where, run, compiled=then_compiled, resume="auto", **of_both)
    if n == 1:
        found["copies"] = copies()
    if n > 1:
        for shard in ("optimizer", "gradients"):
            found[shard] = trained(world, where, f"{n}-{shard}", compiled=True, parallel={"shard": shard})
        found["order"] = order_of_backward(world)
    return found


def hang(world: World, directory: str) -> None:
    """The first rank does not end compiling."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(directory) / "cache")
    where = Path(directory)
    document = {
        "run": {"directory": str(where / "hanging"), "steps": 2, "compile": True},
        "task": {"target": "tests:Hanging"},
        "data": {"train": str(where / "data"), "global_batch": GLOBAL_BATCH},
        "limits": {"start_s": 30.0},
    }
    session, task = session_over(world), Hanging()
    task.hangs = world.rank == 0
    carry_out(parse_recipe(document), task, session=session, resume=Resume(), stop=StopRequest())
