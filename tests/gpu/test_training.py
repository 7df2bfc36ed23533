"""Training steps of one rank: autocast with and without a loss scale, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.nn import functional

from hpctrain.reduce import DistributedOptimizer, StepOutcome
from hpctrain.run import Session, init
from hpctrain.run.compute.device import autocast_for, loss_scale_for
from tests.gpu.check import Check, largest_difference, samples, small_model

WIDTH = 64
STEPS = 25
# Of losses near 2.3, from one step to the next; float16 has 11 bits, bfloat16 has 8.
WITHIN = {"fp16": 0.01, "bf16": 0.05}


def test_fp16(check: Check) -> None:
    _autocast(check, "fp16")


def test_bf16(check: Check) -> None:
    _autocast(check, "bf16")


def _autocast(check: Check, precision: str) -> None:
    """Losses follow those of float32 on the CPU, and a step with non-finite gradients changes nothing except the loss
    scale of fp16."""
    with init(backend="serial", device="cpu") as session:
        expected = [loss for loss, _ in _losses(session, precision="fp32", steps=STEPS)]
    with init(backend="serial", device=str(check.device)) as session:
        losses, outcomes = zip(*_losses(session, precision=precision, steps=STEPS), strict=True)
        _assert_an_overflow_changes_nothing(session, precision=precision)
    worst = largest_difference(losses, expected, within=WITHIN[precision], what=f"{precision} and float32")
    assert all(outcome.applied for outcome in outcomes)
    assert expected[-1] < 0.5 * expected[0], "nothing was learned, so nothing was compared"
    check.found(
        f"{STEPS} steps follow float32 on the CPU; an overflow changes nothing",
        needs_gpu=["the GPU's arithmetic"],
    )
    check.figures |= {"largest difference of a loss": worst, "loss scale": outcomes[-1].loss_scale}


def _losses(session: Session, *, precision: str, steps: int) -> Iterator[tuple[float, StepOutcome]]:
    model, updater = _model(session, precision=precision, width=WIDTH, depth=1)
    autocast = autocast_for(precision, device=session.device)
    for step in range(steps):
        inputs, labels = samples(step % 4, width=WIDTH, size=128, device=session.device)
        with autocast():
            loss = functional.cross_entropy(model(inputs), labels)
        updater.backward(loss, weight=1.0)
        yield float(loss.detach()), updater.step()


def _assert_an_overflow_changes_nothing(session: Session, *, precision: str) -> None:
    model, updater = _model(session, precision=precision, width=WIDTH, depth=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, labels = samples(0, width=WIDTH, size=128, device=session.device)
    with autocast_for(precision, device=session.device)():
        loss = functional.cross_entropy(model(inputs), labels) * float("inf")
    updater.backward(loss, weight=1.0)
    scale = updater.step().loss_scale
    same = all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    assert same, "a step with infinite gradients changed the parameters"
    loss = functional.cross_entropy(model(inputs), labels)
    updater.backward(loss, weight=1.0)
    outcome = updater.step()
    assert outcome.applied, "the step after one with infinite gradients was skipped too"
    assert outcome.loss_scale == (scale / 2 if precision == "fp16" else scale)


def test_memory(check: Check) -> None:
    """Memory does not grow from step to step."""
    width, size = check.of(gpu=2048, cpu=WIDTH), check.of(gpu=4096, cpu=128)
    steps = 30
    with init(backend="serial", device=str(check.device)) as session:
        model, updater = _model(session, precision="fp32", width=width, depth=4)
        batches = [samples(number, width=width, size=size, device=session.device) for number in range(4)]
        held = []
        if check.has_gpu:
            torch.cuda.reset_peak_memory_stats(check.device)
        for step in range(steps):
            if step == 10:
                check.wait()
                begun_s = time.perf_counter()
            inputs, labels = batches[step % 4]
            updater.backward(functional.cross_entropy(model(inputs), labels), weight=1.0)
            updater.step()
            held.append(torch.cuda.memory_allocated(check.device) if check.has_gpu else 0)
        check.wait()
        rate = (steps - 10) * size / (time.perf_counter() - begun_s)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    text = f"{steps} steps of an MLP of {num_parameters:,} parameters hold the same memory from step 5 on"
    check.found(text, needs_gpu=["the device's memory"])
    check.figures["samples/s"] = rate
    if check.has_gpu:
        more = held[-1] - held[4]
        assert more <= 0, f"{more} bytes more are held after step {steps} than after step 5"
        check.figures["MB held"] = held[-1] / 1e6
        check.figures["MB at most"] = torch.cuda.max_memory_allocated(check.device) / 1e6


def _model(
    session: Session, *, precision: str, width: int, depth: int
) -> tuple[torch.nn.Module, DistributedOptimizer]:
    model = small_model(width=width, depth=depth).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scale = loss_scale_for(precision, wire="fp32", max_skipped_in_row=5)
    return model, session.distributed_optimizer(model, optimizer, loss_scale=scale)
