"""What one rank does in the training tests. Runs inside a launch; the test files compare what it returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn import functional

from hpctrain.comm import World, all_gather_json
from hpctrain.errors import StoppedEarly
from hpctrain.resilience import StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.training import Resume, carry_out
from hpctrain.telemetry import read_records
from tests.sessions import session_over

STEPS = 50
# What is trained with each backend. Over Horovod `hierarchical` and `ring` send the same messages as over MPI.
NUMBERS = {
    "mpi": [
        *(("fp64", algorithm) for algorithm in ("flat", "hierarchical", "ring")),
        *(("fp32", algorithm) for algorithm in ("flat", "hierarchical")),
    ],
    "horovod": [*(("fp64", algorithm) for algorithm in ("flat", "hierarchical", "ring")), ("fp32", "flat")],
}
# Steps in which runs are stopped, by backend and number of ranks: the first one, the end of an epoch, somewhere.
STOPS = {
    ("mpi", 1): (1, 29), ("mpi", 2): (29, 44), ("mpi", 3): (1, 29), ("mpi", 4): (29, 44),
    ("horovod", 2): (1, 29), ("horovod", 3): (29, 44),
}  # fmt: skip
GLOBAL_BATCH = 50  # 1438 samples: 29 steps per epoch, the last with 38; 50 and 38 do not divide by 3 and 4


class Classifier:
    """A small classifier of digits that writes down which samples it saw, and can ask its rank to stop."""

    def __init__(self, *, dropout: float = 0.0, overflow: bool = False) -> None:
        self.dropout = dropout
        self.overflow = overflow
        self.seen: list[int] = []
        self.steps = 0
        self.stop: StopRequest | None = None
        self.stop_after = -1
        self.model: torch.nn.Module | None = None

    def build_model(self) -> torch.nn.Module:
        self.model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Dropout(self.dropout),
            torch.nn.Linear(32, 10),
        )  # fmt: skip
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen += fields["id"].tolist()
        self.steps += 1
        if self.stop is not None and self.steps == self.stop_after:
            self.stop.request("test")
        image = fields["image"] / 16
        loss = functional.cross_entropy(model(image), fields["label"])
        # Once an epoch, whichever rank and process has sample 7: float16 overflows, the step is skipped.
        return loss * 1e9 if self.overflow and 7 in fields["id"] else loss

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        image = fields["image"] / 16
        torch.rand(1)  # a metric may draw random numbers: training must not notice
        return {"accuracy": float((model(image).argmax(1) == fields["label"]).double().mean())}

    def fingerprint(self) -> str:
        """Of every bit of the parameters."""
        hasher = xxhash.xxh3_64()
        for name, tensor in sorted(self.model.state_dict().items()):
            hasher.update(name.encode() + tensor.numpy().tobytes())
        return hasher.hexdigest()


class Pulled(Classifier):
    """Gradients depend on the samples alone: where the parameters end tells what was delivered of them."""

    def build_model(self) -> torch.nn.Module:
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        super().loss(model, fields)  # notes samples and steps, and asks to stop
        outputs = model(fields["image"] / 16)
        pull = (fields["id"][:, None] + torch.arange(10)).to(outputs.dtype).sin()
        return (outputs * pull).sum(1).mean()


def nodes_for(num_ranks: int) -> list[str]:
    """Several nodes with several ranks, unequal at three."""
    return {1: ["a"], 2: ["a", "b"], 3: ["a", "a", "b"], 4: ["a", "a", "b", "b"]}[num_ranks]


def train(
    world: World, directory: Path, name: str, *, task: Classifier, resume: str = "never", stop_after: int = 0,
    **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One run; what it left behind. stop_after: this rank asks for a stop in that step (0: nobody does)."""
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory / name), "steps": STEPS, "seed": 5},
        "task": {"target": "tests:Classifier"},
        "data": {
            "train": str(directory / "data"),
            "held_out": str(directory / "data"),
            "global_batch": GLOBAL_BATCH,
        },
        "optimizer": {"name": "adamw", "lr": 5e-3, "schedule": "cosine", "warmup_steps": 5},
    }
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    session = session_over(world, nodes=nodes_for(world.num_ranks))
    stop = StopRequest()
    if stop_after:
        task.stop, task.stop_after = stop, stop_after
    stopped = False
    summary: dict[str, Any] = {}
    try:
        recipe = parse_recipe(document)
        summary = carry_out(recipe, task, session=session, resume=Resume.parse(resume), stop=stop)
    except StoppedEarly:
        stopped = True
    records = list(read_records(directory / name / "metrics" / f"rank-{world.rank:05}.jsonl"))
    return {
        "losses": [r["loss"] for r in records if r["kind"] == "step"],
        "fingerprint": task.fingerprint(),
        "stopped": stopped,
        "summary": summary,
        "samples": sum(r["samples"] for r in records if r["kind"] == "step"),
    }


def numbers(world: World, directory: str) -> dict[str, Any]:
    """Losses of the same training, in float64 and float32, flat and over two levels."""
    where = Path(directory)
    found = {}
    for precision, algorithm in NUMBERS[world.backend]:
        name = f"{world.backend}-{world.num_ranks}-{precision}-{algorithm}"
        found[f"{precision} {algorithm}"] = train(
            world, where, name, task=Classifier(), run={"precision": precision},
            reduction={"algorithm": algorithm, "bucket_mb": 0.004},
        )  # fmt: skip
    return found


def interruptions(world: World, directory: str) -> dict[str, Any]:
    """Stopped at several steps and resumed, against never stopped: dropout, fp16 wire, micro-batches."""
    where = Path(directory)
    options: dict[str, dict[str, Any]] = {
        # Shared measurements: another run directory chooses alike.
        "reduction": {"wire": "fp16", "algorithm": "auto", "calibration": str(where / "calibration.json")},
        "data": {"micro_batches": 2},
        "optimizer": {"clip_norm": 1.0},
        "checkpoint": {"every_steps": 20, "keep": 2},
        "telemetry": {"evaluate_every_steps": 9},
    }
    prefix = f"{world.backend}-{world.num_ranks}-stop"
    whole = train(world, where, f"{prefix}-never", task=Classifier(dropout=0.3, overflow=True), **options)
    found = {"whole": whole}
    for step in STOPS[world.backend, world.num_ranks]:
        asking = step % world.num_ranks == world.rank  # one rank is asked, all agree
        name = f"{prefix}-{step}"
        # Two micro-batches per step: the second call of a step asks.
        first = train(
            world,
            where,
            name,
            task=Classifier(dropout=0.3, overflow=True),
            stop_after=2 * step if asking else 0,
            **options,
        )
        second = train(
            world, where, name, task=Classifier(dropout=0.3, overflow=True), resume="auto", **options
        )
        found[f"{step}"] = {"stopped": first["stopped"], "losses": second["losses"],
                            "fingerprint": second["fingerprint"]}  # fmt: skip
    found["int8"] = _interrupted_int8(world, where, prefix=f"{prefix}-int8")
    return found


def _interrupted_int8(world: World, where: Path, *, prefix: str) -> dict[str, Any]:
    """The same with what int8 has lost, which a checkpoint holds."""
    options = {"reduction": {"wire": "int8", "algorithm": "hierarchical"}, "checkpoint": {"every_steps": 20}}
    whole = train(world, where, f"{prefix}-never", task=Classifier(), **options)
    stop_after = 29 if world.rank == 0 else 0
    train(world, where, prefix, task=Classifier(), stop_after=stop_after, **options)
    resumed = train(world, where, prefix, task=Classifier(), resume="auto", **options)
    return {"whole": whole["losses"], "resumed": resumed["losses"],
            "same": whole["fingerprint"] == resumed["fingerprint"]}  # fmt: skip


ELASTIC_LR = 0.1
ELASTIC: dict[str, dict[str, Any]] = {
    "run": {"steps": 58, "precision": "fp64"},  # two epochs
    "optimizer": {"name": "sgd", "lr": ELASTIC_LR, "schedule": "constant", "warmup_steps": 0},
    "checkpoint": {"every_steps": 58},
}
# What has not been delivered is by node for one, by rank for the other. Here every rank is a node.
ELASTIC_WIRES: dict[str, dict[str, Any]] = {
    "mpi": {"wire": "int8", "algorithm": "direct"},
    "horovod": {"wire": "top-k"},
}


def elastic_name(backend: str, began_with: int) -> str:
    return f"elastic-{backend}-{began_with}"


def elastic_with_fp32(world: World, directory: str) -> None:
    """What the others end as once all is delivered."""
    train(world, Path(directory), elastic_name("fp32", world.num_ranks), task=Pulled(), **ELASTIC)


def begin_elastic(world: World, directory: str) -> list[list[int]]:
    """Stop in the second epoch, at step 35; the samples each rank saw."""
    task = Pulled()
    stop_after = 35 if world.rank == world.num_ranks - 1 else 0
    found = train(world, Path(directory), elastic_name(world.backend, world.num_ranks), task=task,
                  stop_after=stop_after, reduction=ELASTIC_WIRES[world.backend], **ELASTIC)  # fmt: skip
    assert found["stopped"]
    return all_gather_json(world, task.seen)


def end_elastic(world: World, directory: str, began_with: int) -> list[list[int]]:
    """Go on from where `began_with` ranks stopped; the samples each rank saw."""
    task = Pulled()
    train(world, Path(directory), elastic_name(world.backend, began_with), task=task, resume="auto",
          reduction=ELASTIC_WIRES[world.backend], **ELASTIC)  # fmt: skip
    return all_gather_json(world, task.seen)


def everything(world: World, directory: str, resume_from: int) -> dict[str, Any]:
    """All cases of one launch. resume_from: a number of ranks whose elastic run is to be finished, or 0."""
    found: dict[str, Any] = {"numbers": numbers(world, directory), "begun": begin_elastic(world, directory)}
    if (world.backend, world.num_ranks) in STOPS:
        found["interruptions"] = interruptions(world, directory)
    if world.num_ranks == 1:
        elastic_with_fp32(world, directory)
    if resume_from:
        found["ended"] = end_elastic(world, directory, resume_from)
    json.dumps(found)
    return found
