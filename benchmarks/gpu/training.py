"""Checks training steps of one rank: autocast with and without a loss scale, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.nn import functional

from benchmarks.gpu.compare import require
from benchmarks.gpu.outcome import Found, Setting
from benchmarks.gpu.work import small_model
from hpctrain.reduce import DistributedOptimizer, StepOutcome
from hpctrain.run import Session, init
from hpctrain.run.compute.precision import autocast_for, loss_scale_for

WIDTH = 64
STEPS = 25
# Of losses near 2.3, from one step to the next; float16 has 11 bits, bfloat16 has 8.
WITHIN = {"fp16": 0.01, "bf16": 0.05}


def fp16(setting: Setting) -> Found:
    return _autocast(setting, "fp16")


def bf16(setting: Setting) -> Found:
    return _autocast(setting, "bf16")


def _autocast(setting: Setting, precision: str) -> Found:
    """Checks that losses follow those of float32 on the CPU, and that a step with non-finite gradients changes nothing
    except the loss scale of fp16."""
    with init(backend="serial", device="cpu") as session:
        expected = [loss for loss, _ in _losses(session, precision="fp32", steps=STEPS)]
    with init(backend="serial", device=str(setting.device)) as session:
        made = list(_losses(session, precision=precision, steps=STEPS))
        _check_overflow(session, precision=precision)
    worst = max(abs(loss - wanted) for (loss, _), wanted in zip(made, expected, strict=True))
    require(
        worst <= WITHIN[precision],
        f"a loss differs by {worst:.3g} from float32 on the CPU, more than {WITHIN[precision]}",
    )
    skipped = sum(not outcome.applied for _, outcome in made)
    require(skipped == 0, f"{skipped} of {STEPS} steps were skipped")
    require(expected[-1] < 0.5 * expected[0], "nothing was learned, so nothing was compared")
    figures = {"largest difference of a loss": worst, "loss scale": made[-1][1].loss_scale}
    needs = () if setting.has_gpu else ("the GPU's arithmetic",)
    return Found(
        text=f"{STEPS} steps follow float32 on the CPU; an overflow changes nothing",
        figures=figures,
        needs_gpu=needs,
    )


def _losses(session: Session, *, precision: str, steps: int) -> Iterator[tuple[float, StepOutcome]]:
    model, updater = _model(session, precision=precision, width=WIDTH, depth=1)
    autocast = autocast_for(precision, device=session.device)
    for step in range(steps):
        inputs, labels = _batch(step % 4, width=WIDTH, size=128, device=session.device)
        with autocast():
            loss = functional.cross_entropy(model(inputs), labels)
        updater.backward(loss, weight=1.0)
        yield float(loss.detach()), updater.step()


def _check_overflow(session: Session, *, precision: str) -> None:
    model, updater = _model(session, precision=precision, width=WIDTH, depth=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, labels = _batch(0, width=WIDTH, size=128, device=session.device)
    with autocast_for(precision, device=session.device)():
        loss = functional.cross_entropy(model(inputs), labels) * float("inf")
    updater.backward(loss, weight=1.0)
    scale = updater.step().loss_scale
    same = all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    require(same, "a step with infinite gradients changed the parameters")
    loss = functional.cross_entropy(model(inputs), labels)
    updater.backward(loss, weight=1.0)
    outcome = updater.step()
    require(outcome.applied, "the step after one with infinite gradients was skipped too")
    wanted = scale / 2 if precision == "fp16" else scale
    require(
        outcome.loss_scale == wanted,
        f"the loss scale went from {scale} to {outcome.loss_scale}, not {wanted}",
    )


def memory(setting: Setting) -> Found:
    """Checks that memory does not grow from step to step."""
    width, size = setting.of(gpu=2048, cpu=WIDTH), setting.of(gpu=4096, cpu=128)
    steps = 30
    with init(backend="serial", device=str(setting.device)) as session:
        model, updater = _model(session, precision="fp32", width=width, depth=4)
        batches = [_batch(number, width=width, size=size, device=session.device) for number in range(4)]
        held = []
        if setting.has_gpu:
            torch.cuda.reset_peak_memory_stats(setting.device)
        for step in range(steps):
            if step == 10:
                _wait(setting)
                begun_s = time.perf_counter()
            inputs, labels = batches[step % 4]
            updater.backward(functional.cross_entropy(model(inputs), labels), weight=1.0)
            updater.step()
            held.append(torch.cuda.memory_allocated(setting.device) if setting.has_gpu else 0)
        _wait(setting)
        rate = (steps - 10) * size / (time.perf_counter() - begun_s)
    text = f"{steps} steps of an MLP of {sum(p.numel() for p in model.parameters()):,} parameters"
    figures = {"samples/s": rate}
    if not setting.has_gpu:
        return Found(text=text, figures=figures, needs_gpu=("the device's memory",))
    require(
        held[-1] <= held[4], f"{held[-1] - held[4]} bytes more are held after step {steps} than after step 5"
    )
    figures |= {
        "MB held": held[-1] / 1e6,
        "MB at most": torch.cuda.max_memory_allocated(setting.device) / 1e6,
    }
    return Found(text=f"{text} hold the same memory from step 5 on", figures=figures)


def _model(
    session: Session, *, precision: str, width: int, depth: int
) -> tuple[torch.nn.Module, DistributedOptimizer]:
    model = small_model(width=width, depth=depth).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scale = loss_scale_for(precision, wire="fp32", max_skipped_in_row=5)
    return model, session.distributed_optimizer(model, optimizer, loss_scale=scale)


def _batch(number: int, *, width: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs of shape (size, width), float32, and labels of shape (size,), int64, a function of the inputs.
    They are made on the CPU, so that they are equal for every device."""
    inputs = torch.randn(size, width, generator=torch.Generator().manual_seed(number))
    return inputs.to(device), inputs[:, :10].argmax(1).to(device)


def _wait(setting: Setting) -> None:
    if setting.has_gpu:
        torch.cuda.synchronize(setting.device)
