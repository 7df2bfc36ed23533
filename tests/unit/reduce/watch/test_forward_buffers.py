"""A dropped step changes no buffer, and an applied one changes them as without hpctrain."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.distributed import ParallelPlan, ShardKind
from hpctrain.errors import DivergedError
from hpctrain.reduce import LossScale
from hpctrain.reduce.watch.forward_buffers import ALWAYS_BYTES, SMALL_BYTES
from hpctrain.run import Session
from hpctrain.train import Position
from tests.sessions import session_over


class Model(torch.nn.Module):
    """With a buffer of every kind that a forward pass may change, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 2)
        self.again = self.norm  # under a second name
        self.mean: torch.Tensor
        self.total: torch.Tensor
        self.first: torch.Tensor | None
        self.narrow: torch.Tensor
        self.count: torch.Tensor
        self.seen: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))  # replaced
        self.register_buffer("total", torch.zeros(4))  # added to
        self.register_buffer("first", None)  # made by the first pass
        self.register_buffer("narrow", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(ALWAYS_BYTES, dtype=torch.float32))
        self.register_buffer("table", torch.arange(SMALL_BYTES, dtype=torch.float32), persistent=False)
        for number, parameter in enumerate(self.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
                self.total += x.sum(dim=0)
                self.narrow.data.add_(x[0].bfloat16())  # moves no version counter
                self.first = x[0].clone() if self.first is None else self.first
                self.count += len(x)
                self.seen[int(self.count) % len(self.seen)] = x.sum()
        found: torch.Tensor = self.out(self.norm(x - self.mean))
        return found


def rows(step: int, *, bad: bool = False) -> torch.Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    if bad:
        x[2, 1] = torch.inf
    return x


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.fixture
def session() -> Iterator[Session]:
    with session_over(SerialWorld()) as opened:
        yield opened


def train(session: Session, model: torch.nn.Module, steps: list[tuple[int, bool]]) -> list[bool]:
    """Returns which of the steps, with a seed for the rows and whether one is infinite, were applied."""
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    applied = []
    for seed, bad in steps:
        with updater.no_sync():
            model(rows(seed)).square().mean().backward()
        model(rows(seed + 100, bad=bad)).square().mean().backward()
        applied.append(updater.step().applied)
    updater.close()
    return applied


def test_a_step_with_an_infinite_sample_leaves_no_trace_in_any_buffer(session: Session) -> None:
    with_bad, without = Model(), Model()
    assert train(session, with_bad, [(0, False), (1, True), (2, False)]) == [True, False, True]
    assert train(session, without, [(0, False), (2, False)]) == [True, True]
    assert same(values(with_bad), values(without))
    assert all(map(torch.equal, with_bad.parameters(), without.parameters()))


def test_an_infinite_sample_in_the_first_step_leaves_no_trace_either(session: Session) -> None:
    model, expected = Model(), values(Model())
    assert train(session, model, [(1, True)]) == [False]
    found = values(model)
    # It is larger than what is copied before it has been seen to change; the table is, and does not.
    assert found.pop("table").equal(expected.pop("table"))
    assert same(found, expected)
    assert model.first is None


def test_applied_steps_change_buffers_as_a_bare_loop_does(session: Session) -> None:
    model, bare = Model(), Model()
    train(session, model, [(step, False) for step in range(5)])
    optimizer = torch.optim.SGD(bare.parameters(), 0.1)
    for step in range(5):
        for seed in (step, step + 100):
            bare(rows(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(values(model), values(bare))
    assert all(map(torch.equal, model.parameters(), bare.parameters()))


def test_what_changes_buffers_between_two_steps_is_not_undone(session: Session) -> None:
    model = Model()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    model(rows(0)).square().mean().backward()
    updater.step()
    with torch.no_grad():
        model(rows(7))  # statistics are computed again
        model.mean.fill_(5.0)
    before = values(model)
    model(rows(1, bad=True)).square().mean().backward()
    assert not updater.step().applied
    assert same(values(model), before)
    # Another model's values are loaded.
    model.load_state_dict(Model().state_dict(), strict=False)
    before = values(model)
    model(rows(1, bad=True)).square().mean().backward()
    assert not updater.step().applied
    assert same(values(model), before)
    updater.close()


def test_a_step_that_is_not_accepted_and_parts_of_a_model_that_are_called_alone(session: Session) -> None:
    model = Model()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    before = values(model)
    model.out(model.norm(rows(0))).square().mean().backward()
    assert not same(values(model), before)
    assert not updater.step(accepts=lambda norm, sums: False).applied
    assert same(values(model), before)
    updater.close()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # PyTorch 2.15
def test_a_scripted_model_which_takes_no_hooks(session: Session) -> None:
    model = torch.jit.script(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)))
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        before = values(model)
        model(rows(step, bad=step == 1)).square().mean().backward()
        assert updater.step().applied == (step != 1)
        assert same(values(model), before) == (step == 1)
    updater.close()


def test_a_copy_of_the_model_has_nothing_of_the_updater_and_a_closed_one_leaves_no_hook(
    session: Session,
) -> None:
    model = Model()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    written = io.BytesIO()
    torch.save(model.norm, written)
    assert b"hpctrain" not in written.getvalue()
    written.seek(0)
    for other in (copy.deepcopy(model), ema.module):
        other(rows(3, bad=True))
        assert other.get_buffer("mean").isinf().any()
    torch.load(written, weights_only=False)(rows(3))
    updater.close()
    assert not model._forward_pre_hooks
    assert not model.norm._forward_pre_hooks


def test_a_buffer_that_is_too_large_to_copy_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.reduce.watch.forward_buffers.LARGEST_BYTES", 1000)
    model = Model()
    assert train(session, model, [(step, step > 1) for step in range(4)]) == [True, True, False, False]
    (note,) = session.notes
    assert "what its forward pass changed in seen stays" in note


def test_an_end_by_divergence_names_what_is_not_finite_in_the_model(session: Session) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    scale = LossScale(max_skipped_in_row=0)
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1), loss_scale=scale)
    model[0].running_var.fill_(torch.nan)
    model.eval()(rows(0)).square().mean().backward()
    with pytest.raises(
        DivergedError, match=r"Not finite in the model: buffer '0.running_var'\. No learning rate"
    ):
        updater.step()
    updater.close()


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_on_three_ranks_of_which_one_has_an_infinite_sample(shard: ShardKind) -> None:
    def of_rank(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[bool]]:
        with session_over(world) as session:
            model = session.parallelize(Model(), ParallelPlan(shard=shard))
            updater = session.distributed_optimizer(model, torch.optim.Adam(model.parameters(), 0.1))
            applied = []
            for step in range(4):
                before = values(model)
                loss = model(rows(10 * world.rank + step, bad=step == 2 and world.rank == 1)).square().mean()
                loss.backward()
                applied.append(updater.step().applied)
                if step == 2:
                    dropped = before, values(model)
            updater.close()
            return *dropped, applied

    for before, after, applied in run_threads(3, of_rank, timeout_s=300):
        assert applied == [True, True, False, True]
        assert same(after, before)


def test_what_is_loaded_after_a_forward_pass_without_a_step_is_what_is_put_back(
    session: Session, tmp_path: Path
) -> None:
    model = Model()
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    model(rows(0)).square().mean().backward()
    updater.step()
    session.save_state(tmp_path, updater, Position(step=1))
    saved = values(model)

    def dropped() -> dict[str, torch.Tensor]:
        model(rows(1, bad=True)).square().mean().backward()
        assert not updater.step().applied
        return values(model)

    for seed in (5, 6, 7):
        model(rows(seed)).square().mean().backward()
        updater.step()
    model(rows(8))  # to look at what it gives
    session.load_state(tmp_path, updater)
    assert same(dropped(), saved)
    # A part of the model.
    model(rows(8))
    model.norm.load_state_dict(Model().norm.state_dict())
    found = dropped()
    assert same(
        {k: found[k] for k in found if k.startswith("norm")},
        values(torch.nn.ModuleDict({"norm": Model().norm})),
    )
    # Between the forward pass and the step.
    model(rows(1, bad=True)).square().mean().backward()
    model.load_state_dict(Model().state_dict(), strict=False)
    assert not updater.step().applied
    found = values(model)
    found.pop("first")  # not in the state that was loaded
    assert same(found, values(Model()))
    updater.close()


def nets() -> tuple[torch.nn.Module, torch.nn.Module]:
    made = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2)]
    for number, parameter in enumerate(p for net in made for p in net.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return made[0], made[1]


@pytest.mark.parametrize("where", ["judge", "generator", "without gradients"])
def test_what_a_dropped_step_of_one_training_puts_into_the_model_of_another_is_put_back(
    session: Session, where: str
) -> None:
    generator, judge = nets()
    of_generator = session.distributed_optimizer(generator, torch.optim.SGD(generator.parameters(), 0.1))
    of_judge = session.distributed_optimizer(judge, torch.optim.SGD(judge.parameters(), 0.1))
    applied = []
    for step in range(4):
        of_judge.zero_grad()
        with torch.set_grad_enabled(where != "without gradients"):
            made = generator(rows(step, bad=step == 2 and where != "judge"))
        (judge(rows(step + 50)).mean() - judge(made.detach()).square().mean()).backward()
        applied.append(of_judge.step().applied)
        of_generator.zero_grad()
        judge(generator(rows(step + 100, bad=step == 2 and where == "judge"))).square().mean().backward()
        applied.append(of_generator.step().applied)
        assert all(tensor.isfinite().all() for tensor in (*generator.buffers(), *judge.buffers()))
    assert applied.count(False) == 1
    of_judge.close()
    of_generator.close()


def test_a_grad_scaler_that_leaves_out_a_step_of_sparse_gradients(session: Session) -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 4, sparse=True)
            self.norm = torch.nn.BatchNorm1d(4, affine=False)

        def forward(self, index: torch.Tensor, factor: float) -> torch.Tensor:
            found: torch.Tensor = self.norm(factor * self.table(index))
            return found

    model = Rows()
    updater = session.distributed_optimizer(model, torch.optim.SparseAdam(model.table.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before, weights = values(model), model.table.weight.detach().clone()
        updater.zero_grad()
        found = model(torch.tensor([1, 3, step]), torch.inf if step == 1 else 1.0)
        scaler.scale(found[0].sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(updater)  # type: ignore[arg-type]
        scaler.update()
        assert same(values(model), before) == (step == 1)
        assert torch.equal(model.table.weight, weights) == (step == 1)
    updater.close()
