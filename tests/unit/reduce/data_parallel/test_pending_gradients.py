"""Between backward and `step`: what a script may do with the gradients, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpctrain.comm import World
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.watch.step_watch import watch_steps
from hpctrain.topology import Topology
from tests.unit.reduce.data_parallel.updater_cases import batch, make, on_threads, reducer_for, share

CLIP = 0.05


def _half(gradient: Any) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(()), torch.full((), 0.5))


def _fused(gradient: torch.Tensor) -> None:
    torch._fused_sgd_(
        [torch.ones(8, 6, dtype=torch.float64)], [gradient], [], weight_decay=0.0, momentum=0.0, lr=0.1,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
        grad_scale=torch.full((), 2.0), found_inf=torch.zeros(()),
    )  # fmt: skip


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "GradScaler's operation": _half,
    "data": lambda g: g.data.mul_(2.0),
    "detach": lambda g: g.detach().zero_(),
    "fused": _fused,
    "numpy": lambda g: np.multiply(g.numpy(), 2.0, out=g.numpy()),
    "array": lambda g: np.asarray(g),
    "dlpack": lambda g: torch.from_dlpack(g).mul_(2.0),
    "view": lambda g: g.view(-1)[0].fill_(1.0),
    "set": lambda g: g.set_(torch.zeros(8, 6, dtype=torch.float64)),
    "out": lambda g: torch.mul(torch.ones(8, 6, dtype=torch.float64), 2.0, out=g),
    "read": lambda g: float(g.norm()),
    "item": lambda g: g[0, 0].item(),
    "copy": lambda g: copy.deepcopy(g),
    "pointer": lambda g: g.data_ptr(),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_use_of_a_gradient_that_is_being_summed_is_refused(num_ranks: int) -> None:
    def case(world: World) -> None:
        net, updater = make(world)
        x, y = batch(0, torch.float64)
        functional.cross_entropy(net(x), y).backward()
        assert net.first.grad is not None
        assert net.first.grad.shape == net.first.shape
        assert "being summed" in repr(net.first.grad)
        for use in USES.values():
            with pytest.raises(UsageError, match=r"updater\.synchronize\(\)"):
                use(net.first.grad)
        for direct in (updater.optimizer.step, lambda: updater.optimizer.zero_grad(set_to_none=False)):
            with pytest.raises(UsageError, match=r"updater\.step\(\), not the optimizer's"):
                direct()
        assert updater.step().applied
        updater.close()

    on_threads(num_ranks, case)


def engine(world: World) -> Any:
    if world.num_ranks == 1:
        return reducer_for(world)
    maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
    return maker.make(Algorithm.HIERARCHICAL, wire="fp32")


def trained_with(
    world: World,
    step: Callable[[torch.nn.Module, AllReduceUpdater, torch.Tensor], None],
    *,
    overlap: bool = True,
    **options: Any,
) -> list[torch.Tensor]:
    net, updater = make(world, reducer=engine(world), overlap=overlap, **options)
    for number in range(5):
        x, y = (t[share(world)] for t in batch(number, torch.float64))
        step(net, updater, functional.cross_entropy(net(x, with_rare=number == 3), y))
    updater.close()
    return [p.detach().clone() for p in net.parameters()]


def _by_clip_norm(net: torch.nn.Module, updater: AllReduceUpdater, loss: torch.Tensor) -> None:
    loss.backward()
    updater.step()


def _by_torchs_clipping(net: torch.nn.Module, updater: AllReduceUpdater, loss: torch.Tensor) -> None:
    loss.backward()
    updater.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    outcome = updater.step()
    assert outcome.grad_norm == pytest.approx(min(float(norm), CLIP), rel=1e-4)


def _by_another_tensor(net: torch.nn.Module, updater: AllReduceUpdater, loss: torch.Tensor) -> None:
    loss.backward()
    updater.synchronize()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    for p in net.parameters():
        if p.grad is not None:
            p.grad = p.grad * (CLIP / norm).clamp(max=1.0)
    updater.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_summed_gradients_may_be_changed(num_ranks: int, overlap: bool) -> None:
    wanted = on_threads(1, partial(trained_with, step=_by_clip_norm, clip_norm=CLIP))[0]
    for step in (_by_torchs_clipping, _by_another_tensor):
        for found in on_threads(num_ranks, partial(trained_with, step=step, overlap=overlap)):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # torch: c/(norm + 1e-6)


def scaled_training(
    world: World, *, unscales: str, inf_at: int | None = None, overlap: bool = True, scale: float = 2.0**10
) -> dict[str, Any]:
    """unscales: "step": by scaler.step; "before": by unscale_ and clipping before it; "updater": then updater.step."""
    net, updater = make(world, reducer=engine(world), overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    scales = []
    for number in range(6):
        updater.zero_grad()
        x, y = (t[share(world)] for t in batch(number, torch.float64))
        if number == inf_at and world.rank == world.num_ranks - 1:
            x = x * torch.inf
        scaler.scale(functional.cross_entropy(net(x), y)).backward()
        if unscales != "step":
            scaler.unscale_(updater)  # type: ignore[arg-type]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
        if unscales == "updater":
            updater.step()
        else:
            scaler.step(updater)  # type: ignore[arg-type]
        scaler.update()
        scales.append(scaler.get_scale())
    updater.close()
    return {"parameters": [p.detach().clone() for p in net.parameters()], "scales": scales}


@pytest.mark.parametrize(("unscales", "overlap"), [("step", False), ("before", True), ("updater", False)])
def test_grad_scaler_trains_as_one_process_and_skips_on_all_ranks(unscales: str, overlap: bool) -> None:
    for inf_at in (None, 2):
        alone = on_threads(1, partial(scaled_training, unscales=unscales, inf_at=inf_at))[0]
        together = on_threads(3, partial(scaled_training, unscales=unscales, inf_at=inf_at, overlap=overlap))
        for found in together:
            assert found["scales"] == alone["scales"]
            assert all(map(torch.equal, found["parameters"], together[0]["parameters"]))
            for one, other in zip(found["parameters"], alone["parameters"], strict=True):
                assert one.isfinite().all()
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    plain = on_threads(3, partial(scaled_training, unscales=unscales, scale=1.0))
    for one, other in zip(plain[0]["parameters"], on_threads(1, _unscaled)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def normalised_training(
    world: World, *, steps: list[tuple[int, bool]], drops: str = "first"
) -> dict[str, list[torch.Tensor]]:
    """Trains with batch normalisation and a GradScaler.

    steps: number of the batch; whether one rank's is infinite. drops: when the last gradients are dropped: "first",
    after "forward", or by the "model" after forward.
    """
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8)).double()
    generator = torch.Generator().manual_seed(0)  # each thread's own
    for parameter in net.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    updater = AllReduceUpdater(optimizer, comm=world, reducer=engine(world), model=net)
    watch_steps(updater, net, comm=world, compare_ranks="error", say=pytest.fail, together=set())
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for number, infinite in steps:
        if drops == "first":
            updater.zero_grad()
        x, y = (t[share(world)] for t in batch(number, torch.float64))
        if infinite and world.rank == world.num_ranks - 1:
            x = x * torch.inf
        loss = functional.cross_entropy(net(x), y)
        if drops != "first":
            (updater if drops == "forward" else net).zero_grad()
        scaler.scale(loss).backward()
        scaler.step(updater)  # type: ignore[arg-type]
        scaler.update(1.0)
    updater.close()
    return {
        "parameters": [p.detach().clone() for p in net.parameters()],
        "buffers": [buffer.clone() for buffer in net.buffers()],
    }


@pytest.mark.parametrize("drops", ["first", "forward", "model"])
def test_a_step_that_grad_scaler_skips_leaves_no_trace_in_buffers_of_any_rank(drops: str) -> None:
    without = on_threads(2, partial(normalised_training, steps=[(0, False), (1, False)]))
    steps = [(0, False), (5, True), (1, False)]
    for rank, found in enumerate(on_threads(2, partial(normalised_training, steps=steps, drops=drops))):
        for kind in ("parameters", "buffers"):
            assert all(map(torch.equal, found[kind], without[rank][kind])), kind
        assert all(map(torch.equal, found["parameters"], without[0]["parameters"]))


def _unscaled(world: World) -> list[torch.Tensor]:
    net, updater = make(world)
    for number in range(6):
        x, y = batch(number, torch.float64)
        functional.cross_entropy(net(x), y).backward()
        updater.step()
    updater.close()
    return [p.detach().clone() for p in net.parameters()]


def test_after_a_step_that_grad_scaler_left_out_backward_asks_for_zero_grad() -> None:
    def case(world: World) -> str:
        net, updater = make(world)
        x, y = batch(0, torch.float64)
        functional.cross_entropy(net(x), y).backward()
        updater.synchronize()
        with pytest.raises(UsageError, match=r"updater\.zero_grad\(\)") as caught:
            functional.cross_entropy(net(x), y).backward()
        updater.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        assert updater.step().applied
        updater.close()
        return str(caught.value)

    assert len(on_threads(2, case)) == 2


class Pair(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))

        self.only_of_real = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, *, is_real: bool = False) -> torch.Tensor:
        hidden = torch.tanh(x @ self.first) @ self.second
        return hidden * self.only_of_real if is_real else hidden


def adversaries(world: World, *, how: str, overlap: bool, weighted: bool = False) -> list[torch.Tensor]:
    """A WGAN-GP. weighted: backward by the updater. how: who drops the gradients that the generator's backward leaves
    in the judge."""
    nets = [Pair(1), Pair(2)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.05, betas=(0.5, 0.9)) for net in nets]
    updaters = [
        AllReduceUpdater(o, comm=world.duplicate(), reducer=engine(world), overlap=overlap, bucket_bytes=64)
        for o in optimizers
    ]
    (generator, judge), (of_generator, of_judge) = nets, updaters
    droppers = {
        "updater": lambda i: updaters[i].zero_grad(),
        "model": lambda i: nets[i].zero_grad(),
        "optimizer": lambda i: optimizers[i].zero_grad(),
    }
    drop = droppers[how]

    def mine(seed: int) -> torch.Tensor:
        whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return whole.chunk(world.num_ranks)[world.rank]

    for step in range(4):
        for turn in range(2):
            real, noise = mine(10 * step + turn), mine(100 + 10 * step + turn)
            drop(1)
            made = generator(noise).detach()
            between = ((real + made) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = judge(made).mean() - judge(real, is_real=True).mean() + 0.1 * penalty
            if weighted:
                of_judge.backward(loss, weight=1 / world.num_ranks)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
            of_judge.step()
        drop(0)
        (-judge(generator(mine(1000 + step))).mean()).backward()
        of_generator.step()
    for updater in updaters:
        updater.close()
    return [p.detach().clone() for net in nets for p in net.parameters()]


@pytest.mark.parametrize("how", ["updater", "model", "optimizer"])
def test_a_gan_with_an_updater_for_each_model_trains_as_one_process(how: str) -> None:
    alone = on_threads(1, partial(adversaries, how=how, overlap=True))[0]
    for num_ranks, overlap in ((2, False), (3, True)):
        for found in on_threads(num_ranks, partial(adversaries, how=how, overlap=overlap, weighted=overlap)):
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_two_backwards_before_a_step_are_refused_and_train_as_the_words_say() -> None:
    def judge(world: World, how: str) -> list[torch.Tensor]:
        net = Pair(2)
        updater = AllReduceUpdater(
            torch.optim.Adam(net.parameters(), 0.05), comm=world.duplicate(), reducer=engine(world)
        )
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(2, 12, 4, generator=draw, dtype=torch.float64)
            real, made = x.chunk(world.num_ranks, dim=1)[world.rank]
            of_real, of_made = -net(real, is_real=True).mean(), net(made).mean()
            if how == "refused":
                of_real.backward()
                with pytest.raises(
                    UsageError, match=r"\(loss_of_real \+ loss_of_made\)\.backward\(\); or wrap all"
                ):
                    of_made.backward()
                updater.zero_grad()
                continue
            if how == "no_sync":
                with updater.no_sync():
                    of_real.backward()
                of_made.backward()
            else:
                (of_real + of_made).backward()
            assert updater.step().applied
        updater.close()
        return [p.detach().clone() for p in net.parameters()]

    on_threads(2, partial(judge, how="refused"))
    alone = on_threads(1, partial(judge, how="sum"))[0]
    for how in ("sum", "no_sync"):
        for found in on_threads(2, partial(judge, how=how)):
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_block_under_reentrant_checkpointing_that_is_used_twice_is_refused_or_trained() -> None:
    def gradient(net: Pair, *, reentrant: bool) -> torch.Tensor:
        hidden = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(net, hidden, use_reentrant=reentrant)
        return hidden.mean()

    def case(world: World) -> list[torch.Tensor]:
        found = []
        for how in ("refused", "not reentrant", "no_sync"):
            net = Pair(1)
            updater = AllReduceUpdater(
                torch.optim.SGD(net.parameters(), 0.5), comm=world.duplicate(), reducer=engine(world)
            )
            if how == "refused":
                with pytest.raises(UsageError, match="use_reentrant=False"):
                    gradient(net, reentrant=True).backward()
                updater.zero_grad()
            elif how == "no_sync":
                with updater.no_sync():
                    gradient(net, reentrant=True).backward()
                updater.step()
            else:
                gradient(net, reentrant=False).backward()
                updater.step()
            updater.close()
            found.append(net.first.detach().clone())
        return found

    net = Pair(1)
    gradient(net, reentrant=True).backward()
    wanted = net.first.detach() - 0.5 * net.first.grad  # type: ignore[operator]
    for refused, one, other in on_threads(2, case):
        assert torch.equal(refused, net.first.detach())
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(other, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("change", ["double", "half", "shape"])
def test_a_model_that_is_converted_after_the_updater_was_made_is_refused(change: str) -> None:
    def case(world: World, backward: bool) -> None:
        net = torch.nn.Linear(4, 2)
        updater = AllReduceUpdater(
            torch.optim.SGD(net.parameters(), 0.1), comm=world, reducer=reducer_for(world)
        )
        if change == "shape":
            net.weight.data = torch.ones(3, 4)
            net.bias.data = torch.ones(3)
        else:
            net.to({"double": torch.float64, "half": torch.float16}[change])
        if backward:
            net(torch.ones(3, 4, dtype=net.weight.dtype)).sum().backward()
        updater.step()

    for backward in (True, False):
        with pytest.raises(UsageError, match=r"before session\.distributed_optimizer"):
            on_threads(1, partial(case, backward=backward))


@pytest.mark.parametrize("change", ["assign", "meta", "new"])
def test_a_model_with_other_parameters_than_the_updater_is_refused(change: str) -> None:
    def case(world: World) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
        updater = AllReduceUpdater(
            torch.optim.SGD(net.parameters(), 0.1), comm=world, reducer=reducer_for(world), model=net
        )
        if change == "assign":
            net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
        elif change == "meta":
            net.to("meta")
        else:
            net[1].bias = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(UsageError, match=r"1\.bias|0\.weight"):
            updater.step()
        updater.close()

    on_threads(2, case)


def test_a_parametrization_keeps_its_parameter() -> None:
    def case(world: World) -> bool:
        net = torch.nn.Linear(2, 2)
        updater = AllReduceUpdater(
            torch.optim.SGD(net.parameters(), 0.1), comm=world, reducer=reducer_for(world), model=net
        )
        torch.nn.utils.parametrize.register_parametrization(net, "weight", torch.nn.Tanh())
        net(torch.ones(1, 2)).sum().backward()
        applied = updater.step().applied
        updater.close()
        return applied

    assert on_threads(1, case) == [True]
