"""What `save_state` and `load_state` keep besides model and optimizer: types of hyper-parameters, the user's objects,
parameters outside the model, and extra state of modules."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from hpctrain.checkpoint import export_dcp, load_weights, open_checkpoint
from hpctrain.comm import SerialWorld, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from hpctrain.run import Session
from hpctrain.train import Position
from tests.sessions import session_over

Made = tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]


class CountsInGroup(torch.optim.SGD):
    """Keeps counters among the options of its groups, as ScheduleFree and Prodigy do, and state of every type."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["k"], group["weight_sum"] = 0, torch.zeros(())

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            group["seen"] = (group["k"], [None])
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("list", [torch.zeros_like(p), "text"])[0] += group["k"]
                state["wide"] = state.get("wide", torch.zeros(p.shape, dtype=torch.float64)) + 1 / 3
                state["count"] = state.get("count", 0) + 1
                state["name"] = "p"
                state["by_number"] = {1: torch.tensor(0.5), "empty": {}}
                p.data -= group["lr"] / group["k"] * p.grad * float(state["wide"].mean())
        self.state["of_none"] = {"step": self.state.get("of_none", {}).get("step", 0) + 1}


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return torch.nn.Sequential(*layers).to(dtype)


def adamw(**options: Any) -> Callable[[], Made]:
    def made() -> Made:
        model = net()
        return model, torch.optim.AdamW(model.parameters(), **options()), {}

    options_of = options
    options = lambda: {k: v() if callable(v) else v for k, v in options_of.items()}  # noqa: E731
    return made


def with_scheduler(
    make: Callable[[torch.optim.Optimizer], Any], lr: Any = 0.1, kind: Any = torch.optim.SGD, **options: Any
) -> Callable[[], Made]:
    def made() -> Made:
        model = net()
        optimizer = kind(model.parameters(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr, **options)
        return model, optimizer, {"scheduler": make(optimizer)}

    return made


def half_falling(step: int) -> float:
    return 1 / (1 + step)


def with_averages() -> Made:
    model = net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other = torch.optim.Adam(net().parameters(), lr=1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), {"ema": ema, "scaler": scaler, "other": other}


def two_groups() -> Made:
    model = net()
    groups = [{"params": list(model[0].parameters()), "lr": torch.tensor(0.1, dtype=torch.float64)},
              {"params": list(model[3].parameters()), "weight_decay": 0.5}]  # fmt: skip
    return model, torch.optim.AdamW(groups, lr=1), {}


def in_half() -> Made:
    model = net(torch.bfloat16)
    return model, CountsInGroup(model.parameters(), lr=0.01), {}


class Accuracy(torch.nn.Module):
    """Counts in tensors that its state dict has only if asked, as torchmetrics' metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.by_class = torch.zeros((), dtype=torch.int64), [torch.zeros(2)]

    def update(self, step: int) -> None:
        self.right += step
        self.by_class.append(torch.full((2,), float(step)))

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {f"{prefix}right": self.right.clone(), f"{prefix}by_class": [t.clone() for t in self.by_class]}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
        self.right, self.by_class = state["right"], list(state["by_class"])


def with_generator_and_metric() -> Made:
    model = net()
    generator = torch.Generator().manual_seed(5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), {"noise": generator, "accuracy": Accuracy()}


CASES: dict[str, Callable[[], Made]] = {
    "tensor lr": adamw(lr=lambda: torch.tensor(0.1)),
    "float64 tensor lr, capturable off": adamw(
        lr=lambda: torch.tensor(0.1, dtype=torch.float64), foreach=False
    ),
    "tensor betas": adamw(
        lr=lambda: torch.tensor(0.1),
        betas=lambda: (torch.tensor(0.8), torch.tensor(0.9)),
        foreach=False,
    ),
    "integer lr, amsgrad": adamw(lr=1, amsgrad=True),
    "two groups": two_groups,
    "counters in groups": lambda: (m := net(), CountsInGroup(m.parameters(), lr=torch.tensor(0.1)), {}),
    "bfloat16 with wider state": in_half,
    "cosine": with_scheduler(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8)),
    "cosine, tensor lr": with_scheduler(
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8), lr=torch.tensor(0.1)
    ),
    "steps": with_scheduler(lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 4, 4])),
    "one cycle": with_scheduler(
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12), kind=torch.optim.AdamW
    ),
    "cyclic": with_scheduler(
        lambda o: lr_scheduler.CyclicLR(
            o, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="exp_range", gamma=0.9
        ),
        momentum=0.9,
    ),
    "function": with_scheduler(lambda o: lr_scheduler.LambdaLR(o, half_falling)),
    "one after another": with_scheduler(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
        )
    ),
    "plateau": with_scheduler(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5)),
    "swa": with_scheduler(lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=6)),
    "averages": with_averages,
    "generator and metric": with_generator_and_metric,
}


@pytest.fixture
def session() -> Iterator[Session]:
    session = session_over(SerialWorld())
    yield session
    session.close()


def steps(made: Made, updater: Any, count: int, *, begin: int) -> None:
    model, _, also = made
    for number in range(begin, begin + count):
        torch.manual_seed(number)
        x = torch.randn(6, 4, generator=also.get("noise")).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean()
        updater.backward(loss, weight=1.0)
        updater.step()
        scheduler = also.get("scheduler")
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(loss.detach()))
        elif scheduler is not None:
            scheduler.step()
        if "accuracy" in also:
            also["accuracy"].update(number)
        if "ema" in also:
            also["ema"].update_parameters(model)
            also["scaler"].scale(loss.detach())
            also["scaler"].update(8.0 + number)


def seen(made: Made) -> Any:
    """All state, as it can be compared: types, dtypes and bits."""
    model, optimizer, also = made
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {
        name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
        for name, value in also.items()
    }

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [str(value.dtype), value.tolist()]
        if isinstance(value, dict):
            return [type(value).__name__, {repr(key): plain(item) for key, item in value.items()}]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [plain(item) for item in value]]
        return [type(value).__name__, repr(value)]

    return plain(state)


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # PyTorch 2.8's SequentialLR
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_same_values_and_types(session: Session, tmp_path: Path, name: str) -> None:
    made = CASES[name]()
    updater = session.distributed_optimizer(*made[:2])
    assert session.load_state(tmp_path, updater, also=made[2]).step == 0
    steps(made, updater, 3, begin=0)
    session.save_state(tmp_path, updater, Position(step=3), also=made[2])
    saved = seen(made)
    steps(made, updater, 3, begin=3)
    wanted = seen(made)

    again = CASES[name]()
    updater = session.distributed_optimizer(*again[:2])
    before = [group["lr"] for group in again[1].param_groups]
    assert session.load_state(tmp_path, updater, also=again[2]).step == 3
    assert seen(again) == saved
    for lr, group in zip(before, again[1].param_groups, strict=True):
        assert not isinstance(lr, torch.Tensor) or group["lr"] is lr
    steps(again, updater, 3, begin=3)
    assert seen(again) == wanted


@pytest.mark.parametrize("saved_as_float", [False, True])
def test_the_type_of_a_learning_rate_is_that_of_this_run(
    session: Session, tmp_path: Path, saved_as_float: bool
) -> None:
    """Also of a checkpoint that an older version wrote, in which a tensor is a number."""

    def made(lr: Any) -> tuple[torch.optim.Optimizer, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return optimizer, session.distributed_optimizer(model, optimizer)

    tensor = torch.tensor(0.1)
    first, other = (tensor.item(), torch.tensor(0.0)) if saved_as_float else (tensor, 0.0)
    session.save_state(tmp_path, made(first)[1], Position(step=1))
    optimizer, updater = made(other)
    session.load_state(tmp_path, updater)
    (group,) = optimizer.param_groups
    assert type(group["lr"]) is type(other)
    assert float(group["lr"]) == float(tensor)


def test_a_changed_option_takes_effect_and_others_are_as_saved(session: Session, tmp_path: Path) -> None:
    def made(weight_decay: float) -> tuple[torch.optim.Optimizer, Any, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=weight_decay)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=9)
        return optimizer, scheduler, session.distributed_optimizer(model, optimizer)

    optimizer, scheduler, updater = made(0.1)
    optimizer.step()
    scheduler.step()
    betas = optimizer.param_groups[0]["betas"]
    session.save_state(tmp_path, updater, Position(step=1), also={"scheduler": scheduler})
    optimizer, scheduler, updater = made(0.3)
    assert optimizer.param_groups[0]["betas"] != betas
    session.load_state(tmp_path, updater, also={"scheduler": scheduler})
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert optimizer.param_groups[0]["betas"] == betas


def test_a_scheduler_that_is_not_saved_is_noted_once(session: Session, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = session.distributed_optimizer(model, optimizer)
    session.save_state(tmp_path, updater, Position(step=1))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    for also in ({"scheduler": scheduler}, {"scheduler": None}):
        session.save_state(tmp_path, updater, Position(step=2), also=also)
    assert not [note for note in session.notes if "scheduler" in note]
    for step in (3, 4):
        session.save_state(tmp_path, updater, Position(step=step))
    (note,) = [note for note in session.notes if "scheduler" in note]
    assert "also={'scheduler': scheduler}" in note


class Odd:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any = None, error: Exception | None = None) -> None:
        self.state, self.error = state, error

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.error is not None:
            raise self.error
        self.state = state


def test_objects_that_do_not_fit_are_named(session: Session, tmp_path: Path) -> None:
    model = net()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused: list[tuple[Any, type[HpctrainError], str]] = [
        ({"s": 3}, UsageError, r"also\['s'\] is a int, which has no state_dict\(\)"),
        ({"a/b": Odd()}, UsageError, "an object has the name"),
        ({"s": Odd({"x": [object()]})}, CheckpointError, r"also\['s'\]\['x'\]\['0'\] is a builtins.object"),
    ]
    for also, kind, message in refused:
        with pytest.raises(kind, match=message):  # at the start of a run already
            session.load_state(tmp_path / "none", updater, also=also)
        with pytest.raises(kind, match=message):
            session.save_state(tmp_path / "none", updater, Position(step=1), also=also)
    assert not list(tmp_path.glob("none/*"))

    objects = {"a": Odd((1, 2)), "b": None, "net": torch.nn.Linear(2, 2)}
    session.save_state(tmp_path, updater, Position(step=1), also=objects)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for also, message in (
        ({"a": Odd(), "net": None, "c": Odd()}, r"holds no 'c' \(it holds 'a', 'net'\): leave 'c' out"),
        ({"a": Odd()}, r"also holds 'net', saved with also=.* or also=\{'net': None\}"),
        (
            {"a": None, "net": torch.nn.Linear(2, 3)},
            r"weight is float32 \(2, 2\) in the checkpoint, float32 \(3, 2\) in this run",
        ),
        (None, "also holds 'a', 'net'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            session.load_state(tmp_path, updater, also=also)
    assert not torch.equal(before[0], next(model.parameters()))  # nothing was loaded
    with pytest.raises(CheckpointError, match=r"also\['a'\]: Odd.load_state_dict raised ValueError: no"):
        session.load_state(tmp_path, updater, also={"a": Odd(error=ValueError("no")), "net": None})
    found = Odd()
    session.load_state(tmp_path, updater, also={"a": found, "net": None})
    assert found.state == (1, 2)


def test_a_second_updater_of_the_same_parameters_is_refused(session: Session) -> None:
    model = net()
    first = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        UsageError, match=r"'3\.weight' is trained by another updater of this session: call close"
    ):
        session.distributed_optimizer(model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    first.close()
    halves = [
        session.distributed_optimizer(model, torch.optim.SGD(model[i].parameters(), lr=0.1)) for i in (0, 3)
    ]
    model(torch.ones(6, 4)).mean().backward()
    assert all(updater.step().applied for updater in halves)


def test_parameters_outside_the_model_are_saved_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    def run(world: World, directory: Path, count: int, begin: int) -> tuple[float, Any]:
        session = session_over(world)
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():  # not from a seed: the threads share torch's generator
            model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3, -0.4]]))
            model.bias.zero_()
        weight = torch.nn.Parameter(torch.tensor(float(world.rank)))
        groups = [{"params": list(model.parameters())}, {"params": [weight], "lr": 0.05}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        updater = session.distributed_optimizer(model, optimizer)
        step = session.load_state(directory, updater).step
        for number in range(step, step + count):
            x = torch.arange(8.0).view(2, 4) / (number + 1)
            loss = model(x).square().mean() * torch.exp(-weight) + weight
            updater.backward(loss, weight=1 / world.num_ranks)
            updater.step()
        session.save_state(directory, updater, Position(step=step + count))
        values = weight.item(), model.weight.tolist()
        session.close()
        return values

    whole = run_threads(2, lambda world: run(world, tmp_path / "whole", 6, 0), timeout_s=300)
    assert whole[0] == whole[1]
    run_threads(2, lambda world: run(world, tmp_path / "parts", 3, 0), timeout_s=300)
    parts = run_threads(2, lambda world: run(world, tmp_path / "parts", 3, 3), timeout_s=300)
    assert parts == whole


class Scaled(torch.nn.Linear):
    """A module whose extra state is `self.state`."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


EXTRA: list[Any] = [
    {"largest": 1.5, "history": (torch.tensor([0.5, 1.0]), None)},
    None,
    torch.tensor([1, 2]),
    "text",
    {3: {"json": torch.tensor(1.0)}},
]


def test_extra_state_of_any_type_is_saved_and_loaded(session: Session, tmp_path: Path) -> None:
    def model(states: list[Any]) -> torch.nn.Module:
        return torch.nn.Sequential(*map(Scaled, states), Scaled(io.BytesIO(b"pickled")))

    made = model(EXTRA)
    updater = session.distributed_optimizer(made, torch.optim.SGD(made.parameters(), lr=0.1))
    path = session.save_state(tmp_path / "x", updater, Position(step=1))
    for way in ("state", "weights"):
        other = model([0] * len(EXTRA))
        if way == "state":
            session.load_state(
                tmp_path / "x",
                session.distributed_optimizer(other, torch.optim.SGD(other.parameters(), lr=0.1)),
            )
        else:
            load_weights(other, path, comm=SerialWorld())
        found = [layer.state for layer in other]
        assert found.pop().read() == b"pickled"
        assert json.dumps(found, default=torch.Tensor.tolist) == json.dumps(
            EXTRA, default=torch.Tensor.tolist
        )
    export_dcp(path, tmp_path / "dcp", comm=SerialWorld())
    bad = model([{"x": object()}])
    with pytest.raises(
        UsageError, match=r"'0._extra_state' of the model's state\['x'\] is a builtins.object"
    ):
        session.distributed_optimizer(bad, torch.optim.SGD(bad.parameters(), lr=0.1))


def test_extra_state_and_objects_that_differ_between_ranks(tmp_path: Path) -> None:
    """Extra state is rank 0's, as buffers are, whatever its length; the user's objects must be the same."""

    def run(world: World) -> str:
        session = session_over(world)
        model = Scaled({"amax": [1.5] * (1 + world.rank)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = session.distributed_optimizer(model, optimizer)
        session.save_state(tmp_path, updater, Position(step=1))
        model.state = None
        session.load_state(tmp_path, updater)
        assert model.state == {"amax": [1.5]}
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        plateau.step(0.5 + world.rank)
        with pytest.raises(CheckpointError) as error:
            session.save_state(tmp_path, updater, Position(step=2), also={"plateau": plateau})
        session.close()
        return str(error.value)

    messages = run_threads(2, run, timeout_s=300)
    assert messages[0] == messages[1]
    assert "also['plateau']" in messages[0]
    assert "is 0.5 on rank 0, 1.5 on rank 1" in messages[0]


def test_groups_of_the_same_size_say_what_differs(session: Session, tmp_path: Path) -> None:
    def updater_of(*groups: list[str], names: tuple[str, ...] = ("a", "b", "c")) -> Any:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in names})
        given = [{"params": [model[name].weight for name in group]} for group in groups]
        return session.distributed_optimizer(model, torch.optim.SGD(given, lr=0.1))

    session.save_state(tmp_path, updater_of(["a", "b"], ["c"]), Position(step=1))
    for groups, message in (
        (
            (["b", "a"], ["c"]),
            "group 0 has the same 2 parameters in another order: number 0 is 'a.weight' in the checkpoint, 'b.wei",
        ),
        ((["a", "c"], ["b"]), "'b.weight' is in group 0 in the checkpoint, in another one in this run"),
        ((["a", "b", "c"],), r"2 \+ 1 parameters in the checkpoint, 3 parameters in this run"),
        ((["a", "b"],), "'c.weight' is not in this run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            session.load_state(tmp_path, updater_of(*groups))


def test_a_run_without_such_objects_has_no_more_tensors_than_before(session: Session, tmp_path: Path) -> None:
    model = net()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    path = session.save_state(tmp_path, updater, Position(step=1))
    checkpoint = open_checkpoint(path, comm=SerialWorld())
    assert {name for name in checkpoint.tensors if not name.startswith("generators/")} == {
        f"model/{name}" for name in model.state_dict()
    }  # no step was taken
    assert "also" not in checkpoint.document
