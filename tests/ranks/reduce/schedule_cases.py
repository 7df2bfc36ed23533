"""What ranks do in test_schedules: schedules against a reference that holds all workers in one process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World, all_gather_json
from hpctrain.reduce import ScheduledUpdater
from hpctrain.run import Session
from hpctrain.topology import Topology
from hpctrain.train import Position
from tests.sessions import session_over

STEPS = 11
CLIP = 0.5
Optimize = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimize] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """One training: its schedule, its optimizer, and whether gradients are clipped."""

    schedule: Mapping[str, Any]
    optimizer: str = "sgd"
    clip_norm: float | None = None


CASES = {
    "local-sgd": Case({"method": "local-sgd", "every": 3}, "adamw", CLIP),
    "post-local": Case({"method": "local-sgd", "every": 2, "from_step": 4}, "momentum"),
    "diloco": Case({"method": "diloco", "every": 3}, "adamw"),
    "diloco, plain outer": Case(
        {"method": "diloco", "every": 4, "outer_lr": 0.5, "outer_momentum": 0.0}, "sgd", CLIP
    ),
    "daso": Case({"method": "daso", "every": 4, "wait": 2}, "momentum"),
    "daso, waits": Case({"method": "daso", "every": 2, "wait": 0, "from_step": 3}, "sgd", CLIP),
}
INT8 = {
    "diloco int8": Case({"method": "diloco", "every": 3, "wire": "int8"}, "adamw"),
    "daso int8": Case({"method": "daso", "every": 4, "wait": 2, "wire": "int8"}, "momentum"),
    "local-sgd fp16": Case({"method": "local-sgd", "every": 3, "wire": "fp16"}, "sgd"),
}


def new_model() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def samples(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r has r + 1 samples: shares differ."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rank + 1, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(rank + 1, 3, generator=generator, dtype=torch.float64)


def share_of(rank: int, num_ranks: int) -> float:
    return (rank + 1) / sum(range(1, num_ranks + 1))


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, wanted = samples(step, rank)
    return (model(inputs) - wanted).square().mean()


# ---------------------------------------------------------------- the reference, without any of hpctrain


class Reference:
    """All workers of a schedule in one process."""

    def __init__(self, case: Case, workers: Sequence[Sequence[int]]) -> None:
        self.case = case
        self.schedule = case.schedule
        self.workers = workers
        self.num_ranks = sum(map(len, workers))
        self.models = [new_model() for _ in workers]
        make = OPTIMIZERS[case.optimizer]
        self.optimizers = [make(list(model.parameters())) for model in self.models]
        self.base = [p.detach().clone() for p in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(base) for base in self.base]
        self.done = 0
        self.on_its_way: list[torch.Tensor] | None = None
        self.waits = 0

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.step(step)

    def step(self, step: int) -> None:
        num = len(self.workers)
        if step < self.schedule.get("from_step", 0):
            self._synchronous(step)
            return
        for model, optimizer, ranks in zip(self.models, self.optimizers, self.workers, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, step, rank) * share_of(rank, self.num_ranks) * num).backward()
            self._clip(model)
            optimizer.step()
        self.done += 1
        if self.schedule["method"] == "daso":
            self._daso()
        elif self.done == self.schedule["every"]:
            self.done = 0
            self._outer(self._mean())

    def _synchronous(self, step: int) -> None:
        model = self.models[0]
        model.zero_grad()
        for rank in range(self.num_ranks):
            (loss_of(model, step, rank) * share_of(rank, self.num_ranks)).backward()
        self._clip(model)
        for other in self.models[1:]:
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                mine.grad = theirs.grad.clone() if theirs.grad is not None else None
        for optimizer in self.optimizers:
            optimizer.step()
        self.base = [p.detach().clone() for p in model.parameters()]

    def _clip(self, model: torch.nn.Module) -> None:
        if self.case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.case.clip_norm)

    def _mean(self) -> list[torch.Tensor]:
        columns = zip(*(model.parameters() for model in self.models), strict=True)
        return [torch.stack([p.detach() for p in column]).mean(0) for column in columns]

    def _outer(self, mean: list[torch.Tensor]) -> None:
        if self.schedule["method"] == "diloco":
            lr = self.schedule.get("outer_lr", 0.7)
            momentum = self.schedule.get("outer_momentum", 0.9)
            for base, new, velocity in zip(self.base, mean, self.velocity, strict=True):
                gradient = base - new
                velocity.mul_(momentum).add_(gradient)
                base.sub_(lr * (gradient + momentum * velocity))
        else:
            self.base = mean
        self._give(1.0)

    def _give(self, weight: float) -> None:
        with torch.no_grad():
            for model in self.models:
                for parameter, base in zip(model.parameters(), self.base, strict=True):
                    parameter.copy_((1 - weight) * parameter + weight * base)

    def _daso(self) -> None:
        wait, num = self.schedule["wait"], len(self.workers)
        if self.on_its_way is not None:
            self.waits -= 1
            if self.waits == 0:
                self.base, self.on_its_way = self.on_its_way, None
                self._give(num / (2 * wait + num))
        if self.done == self.schedule["every"]:
            self.done = 0
            mean = self._mean()
            if wait == 0:
                self.base = mean
                self._give(1.0)
            else:
                self.on_its_way, self.waits = mean, wait


# ---------------------------------------------------------------- the same by hpctrain


class Trial:
    """A training of a case in a session; `nodes` has the name of each rank's node."""

    def __init__(self, world: World, case: Case, *, nodes: str, **options: Any) -> None:
        self.session: Session = session_over(world, nodes=list(nodes), emulated=True)
        self.model = new_model()
        self.optimizer = OPTIMIZERS[case.optimizer](list(self.model.parameters()))
        updater = self.session.distributed_optimizer(
            self.model, self.optimizer, algorithm="hierarchical", bucket_bytes=200, clip_norm=case.clip_norm,
            schedule=case.schedule, **options,
        )  # fmt: skip
        assert isinstance(updater, ScheduledUpdater)
        self.updater = updater
        self.outcomes: list[Any] = []

    def train(self, first: int, last: int) -> None:
        rank, num_ranks = self.session.rank, self.session.world_size
        for step in range(first, last):
            self.updater.backward(loss_of(self.model, step, rank), weight=share_of(rank, num_ranks))
            self.outcomes.append(self.updater.step(sums={"one": 1.0}))

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def close(self) -> None:
        # The world continues: the next trial uses it.
        self.session.end_training()


def workers_of(case: Case, nodes: str) -> list[list[int]]:
    if case.schedule["method"] != "daso":
        return [[rank] for rank in range(len(nodes))]
    return [list(ranks) for ranks in Topology.from_node_names(list(nodes)).ranks_by_node]


def furthest(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def mark_of(tensors: Sequence[torch.Tensor]) -> str:
    mark = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        mark.update(tensor.detach().contiguous().numpy().tobytes())
    return mark.hexdigest()


def everything(world: World, nodes: str, directory: str, loads_from: int | None = None) -> dict[str, Any]:
    """loads_from: the number of ranks of an earlier launch, whose checkpoints this launch loads."""
    found: dict[str, Any] = {"every step": every_step_equals_synchronous(world, nodes)}
    found["elsewhere"] = elsewhere(world, nodes, Path(directory), loads_from=loads_from)
    found["statistics"] = statistics(world, nodes)
    found["bytes"] = bytes_of_rounds(world, nodes)
    found["reference"] = {name: against_reference(world, case, nodes) for name, case in CASES.items()}
    found["int8"] = {name: against_reference(world, case, nodes) for name, case in INT8.items()}
    found["resumed"] = {
        name: resumes(world, case, nodes, Path(directory) / f"{world.num_ranks}-{nodes}-{number}")
        for number, (name, case) in enumerate({**CASES, **INT8}.items())
    }
    return found


def every_step_equals_synchronous(world: World, nodes: str) -> dict[str, float]:
    """`every = 1` with plain SGD, against the synchronous updater; ranks have different shares."""
    session = session_over(world, nodes=list(nodes), emulated=True)
    model = new_model()
    updater = session.distributed_optimizer(model, OPTIMIZERS["sgd"](list(model.parameters())))
    rank, num_ranks = session.rank, session.world_size
    for step in range(STEPS):
        updater.backward(loss_of(model, step, rank), weight=share_of(rank, num_ranks))
        updater.step()
    wanted = [p.detach().clone() for p in model.parameters()]
    session.end_training()
    found = {}
    for method in ("local-sgd", "diloco", "daso"):
        more = {"outer_lr": 1.0, "outer_momentum": 0.0} if method == "diloco" else {}
        more |= {"wait": 0} if method == "daso" else {}
        trial = Trial(world, Case({"method": method, "every": 1, **more}), nodes=nodes)
        trial.train(0, STEPS)
        assert all(outcome.agreed and outcome.round_ended for outcome in trial.outcomes)
        found[method] = furthest(trial.values(), wanted)
        trial.close()
    return found


def against_reference(world: World, case: Case, nodes: str) -> dict[str, Any]:
    """Largest difference from the reference after each step; and after `end_round`, from the other ranks."""
    workers = workers_of(case, nodes)
    worker = next(number for number, ranks in enumerate(workers) if world.rank in ranks)
    reference, trial = Reference(case, workers), Trial(world, case, nodes=nodes)
    differences = []
    for step in range(STEPS):
        reference.step(step)
        trial.train(step, step + 1)
        differences.append(furthest(trial.values(), list(reference.models[worker].parameters())))
    kinds = "".join(
        "e" if outcome.round_ended else "v" if outcome.agreed else "l" for outcome in trial.outcomes
    )
    for outcome in trial.outcomes:  # of a local step: this worker's number, times the number of workers
        ranks = world.num_ranks if outcome.agreed else len(workers) * len(workers[worker])
        assert outcome.sums == {"one": float(ranks)}
    trial.updater.end_round()
    marks = all_gather_json(world, mark_of(trial.values()))
    found = {"differences": differences, "kinds": kinds, "same": len(set(marks)) == 1}
    trial.close()
    return found


def resumes(world: World, case: Case, nodes: str, directory: Path) -> list[int]:
    """Saves after each of some steps, and continues in a new session. Returns the steps after which bits differ."""
    whole = Trial(world, case, nodes=nodes)
    marks: dict[int, str] = {}
    saves = (2, 3, 5, 6, 8, 9)
    for step in range(STEPS):
        whole.train(step, step + 1)
        if step + 1 in saves:
            whole.session.save_state(directory / str(step + 1), whole.updater, Position(step=step + 1))
    marks[STEPS] = mark_of([*whole.values(), *_optimizer_tensors(whole.optimizer)])
    whole.updater.end_round()
    ended = mark_of(whole.values())
    whole.close()
    wrong = []
    for step in saves:
        again = Trial(world, case, nodes=nodes)
        position = again.session.load_state(directory / str(step), again.updater)
        assert position.step == step
        again.train(step, STEPS)
        same = mark_of([*again.values(), *_optimizer_tensors(again.optimizer)]) == marks[STEPS]
        again.updater.end_round()
        same = same and mark_of(again.values()) == ended
        if not all(all_gather_json(world, same)):
            wrong.append(step)
        again.close()
    return wrong


def elsewhere(world: World, nodes: str, directory: Path, *, loads_from: int | None) -> dict[str, Any]:
    """Saves within a round; and loads what another number of ranks has saved, and trains on.

    Returns this rank's values when it saved, and its values after it has loaded.
    """
    found: dict[str, Any] = {}
    for name in ("local-sgd", "diloco", "daso"):
        trial = Trial(world, CASES[name], nodes=nodes)
        if loads_from is not None:
            trial.session.load_state(directory / f"of-{loads_from}-{name}", trial.updater)
            found[f"{name} loaded"] = _own(trial)
            trial.train(5, 8)
            trial.updater.end_round()
            marks = all_gather_json(world, mark_of(trial.values()))
            assert len(set(marks)) == 1
            trial.close()
            trial = Trial(world, CASES[name], nodes=nodes)
        trial.train(0, 5)
        trial.session.save_state(directory / f"of-{world.num_ranks}-{name}", trial.updater, Position(step=5))
        found[f"{name} saved"] = _own(trial)
        trial.close()
    return found


def _own(trial: Trial) -> list[list[float]]:
    return [
        value.double().flatten().tolist() for value in (*trial.values(), *_optimizer_tensors(trial.optimizer))
    ]


def statistics(world: World, nodes: str) -> float:
    """Running statistics of batch norm when a round ends: how far they are from the mean of the workers'."""
    session = session_over(world, nodes=list(nodes), emulated=True)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    updater = session.distributed_optimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), schedule={"method": "local-sgd", "every": 2}
    )
    norm = model[0]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    for step in range(2):
        inputs = torch.randn(
            4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step + 10 * world.rank)
        )
        updater.backward(model(inputs).square().mean(), weight=1 / world.num_ranks)
        assert norm.running_mean is not None
        before = norm.running_mean.tolist()
        updater.step()
    mean = torch.tensor(all_gather_json(world, before), dtype=torch.float64).mean(0)
    session.end_training()
    return float((norm.running_mean - mean).abs().max())


def bytes_of_rounds(world: World, nodes: str) -> list[int]:
    """Bytes that reducers send to other nodes: by ten synchronous steps, and by ten steps in rounds of five."""
    found = []
    for schedule in (None, {"method": "local-sgd", "every": 5}):
        session = session_over(world, nodes=list(nodes), emulated=True)
        model = torch.nn.Linear(100, 100)
        updater = session.distributed_optimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="hierarchical", schedule=schedule
        )
        for _ in range(10):
            updater.backward(model(torch.ones(2, 100)).mean(), weight=1 / world.num_ranks)
            updater.step()
        found.append(
            sum(all_gather_json(world, sum(made.reducer.bytes_sent() for made in session.reductions._made)))
        )
        session.end_training()
    return found


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = copy.copy(optimizer.state_dict()["state"])
    return [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
