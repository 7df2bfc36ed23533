"""Loops whose fault is in the loss, in its gradients, or in how those of micro-batches are added up."""

import contextlib
import time

import torch
from torch import nn
from torch.nn import functional

import hpctrain
from tests.check.loops import (
    batches_of,
    classifier,
    data,
    entropy,
    looped,
    parts,
    plain,
    sgd,
    step_of,
)


def sound(session):
    model, updater, loader = parts(session)

    def batches(epoch):
        loader.sampler.set_epoch(epoch)
        return loader

    def evaluate():
        model.eval()
        with torch.no_grad():
            x, y = data()[:16]
            loss = entropy(model, x.to(next(model.parameters()).dtype), y)
        model.train()
        return {"loss": float(loss)}

    return batches, step_of(updater, lambda batch: entropy(model, *batch)), evaluate


def slow_rank(session):
    """A sound loop whose ranks are not equally fast."""
    loader, plain_step = plain(session)

    def step(batch):
        time.sleep(0.05 * session.rank)
        return plain_step(batch)

    return loader, step


def sharded(session):
    """Sound: the parameters are split over the ranks."""
    model = classifier()
    session.parallelize(model, hpctrain.ParallelPlan(shard="parameters"))
    return looped(session, entropy, model=model)[:2]


def grad_scaler(session):
    model, updater, loader = parts(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(batch):
        updater.zero_grad()
        loss = entropy(model, *batch)
        scaler.scale(loss).backward()
        scaler.step(updater)
        scaler.update()
        return loss

    return loader, step


def bias_before_batch_norm(session):
    """Sound: the bias of the first layer has no gradient but rounding, which the optimizer enlarges."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return looped(session, entropy, model=session.sync_batch_norm(model))[:2]


def gradients_by_hand(session):
    """Changes .grad on the way to the optimizer, by an operation that leaves the version counter as it is."""
    model, updater, loader = parts(session)

    def clamp():
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)

    return loader, step_of(updater, lambda batch: entropy(model, *batch), before_update=clamp)


def hook_clips(session):
    """Clips what each rank's backward computes."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    model.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return looped(session, entropy, model=model)[:2]


def detached_scale(session):
    """Divides by the batch's own loss, which the value does not show."""

    def loss_of(model, x, y):
        loss = entropy(model, x, y)
        return loss / loss.detach()

    return looped(session, loss_of)[:2]


def no_step(session):
    """Computes gradients, and never calls the updater."""
    model, _, loader = parts(session)

    def step(batch):
        loss = entropy(model, *batch)
        model.zero_grad()
        return loss

    return loader, step


def not_finite_on_one_rank(session):
    """Rank 1 of several gets NaN."""
    model, updater, loader = parts(session)
    added = float("nan") if session.rank else 0.0
    return loader, step_of(updater, lambda batch: entropy(model, batch[0] + added, batch[1]))


def max_norm(session):
    """Shrinks rows of an embedding in forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 2))
    rows = torch.randint(0, 20, (96,), generator=torch.Generator().manual_seed(1))
    step = step_of(sgd(session, model), lambda batch: model(batch).square().mean())
    return batches_of(session, rows), step


def one_class(session):
    """A mean over the samples of some classes, of which thirds of a batch may have equally many."""
    return looped(session, lambda model, x, y: model(x)[y > 0].square().mean())[:2]


def two_means(session):
    """A mean over all samples and one over those of one class, as detectors have."""

    def loss_of(model, x, y):
        outputs = model(x)
        return functional.cross_entropy(outputs, y) + outputs[y > 0].square().mean()

    return looped(session, loss_of)[:2]


def sum_and_mean(session):
    """A mean and a sum, as the divergence of an autoencoder often is."""

    def loss_of(model, x, y):
        outputs = model(x)
        return functional.cross_entropy(outputs, y) + 0.01 * outputs.square().sum()

    return looped(session, loss_of)[:2]


def in_pieces(session, size, *, divided=True, synced=False):
    """Accumulates over parts of `size` samples and what is left. divided: each with the same weight, otherwise with
    that of a batch. synced: without `no_sync`."""
    model, updater, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        losses = []
        pieces = list(zip(batch[0].split(size), batch[1].split(size), strict=True))
        for number, (x, y) in enumerate(pieces, start=1):
            loss = entropy(model, x, y) / (len(pieces) if divided else 1)
            with contextlib.nullcontext() if synced or number == len(pieces) else updater.no_sync():
                loss.backward()
            losses.append(loss.detach())
        updater.step()
        return torch.stack(losses).sum() if divided else torch.stack(losses).mean()

    return loader, step


def wrong_accumulation(session):
    """Adds up the gradients of parts without weighing them."""
    return in_pieces(session, 4, divided=False)


def backward_twice(session):
    """Accumulates without `no_sync`."""
    return in_pieces(session, 4, synced=True)


def uneven_parts(session):
    """The last part of a batch is smaller, and weighs as much as the others."""
    return in_pieces(session, 5)


def in_parts(batch, count):
    return zip(batch[0].chunk(count), batch[1].chunk(count), strict=True)


def accumulated(session, *, after_part=lambda model, updater: None):
    """Accumulates over `micro_batches` equal parts. after_part: called after each part's backward."""
    model, updater, loader = parts(session)

    def step(batch, *, micro_batches=1):
        updater.zero_grad()
        total = 0.0
        for number, (x, y) in enumerate(in_parts(batch, micro_batches), start=1):
            loss = entropy(model, x, y) / micro_batches
            with contextlib.nullcontext() if number == micro_batches else updater.no_sync():
                loss.backward()
            after_part(model, updater)
            total += float(loss.detach())
        updater.step()
        return total

    return loader, step


def sound_in_parts(session):
    return accumulated(session)


def decays_each_part(session):
    """Weight decay by hand after each micro-batch."""

    def decay(model, updater):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    return accumulated(session, after_part=decay)


def schedules_each_part(session):
    """Steps its scheduler after each micro-batch."""
    made = []

    def schedule(model, updater):
        if not made:
            made.append(torch.optim.lr_scheduler.ExponentialLR(updater.optimizer, 0.5))
        made[0].step()

    return accumulated(session, after_part=schedule)


def clips_each_part(session):
    """Clips the gradients of each micro-batch by themselves."""
    model, updater, loader = parts(session)

    def step(batch, *, micro_batches=1):
        updater.zero_grad()
        total = 0.0
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in in_parts(batch, micro_batches):
            loss = entropy(model, x, y) / micro_batches
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for into, gradient in zip(sums, gradients, strict=True):
                into += gradient * (0.1 / norm).clamp(max=1.0)
            total += float(loss.detach())
        sum((p * g).sum() for p, g in zip(model.parameters(), sums, strict=True)).backward()
        updater.step()
        return total

    return loader, step


def steps_each_part(session):
    """Steps the optimizer after each micro-batch."""
    model, updater, loader = parts(session)

    def step(batch, *, micro_batches=1):
        total = 0.0
        for x, y in in_parts(batch, micro_batches):
            updater.zero_grad()
            loss = entropy(model, x, y) / micro_batches
            loss.backward()
            updater.step()
            total += float(loss.detach())
        return total

    return loader, step


CAUSES = {
    sound: None,
    slow_rank: None,
    sharded: None,
    grad_scaler: None,
    bias_before_batch_norm: None,
    gradients_by_hand: "GRADIENTS",
    hook_clips: "GRADIENTS",
    detached_scale: "GRADIENTS",
    no_step: "NOT_APPLIED",
    not_finite_on_one_rank: "NOT_FINITE",
    max_norm: "DRIFT",
    one_class: "LOSS_WEIGHTS",
    two_means: "LOSS_WEIGHTS",
    sum_and_mean: "ACCUMULATION",
    wrong_accumulation: "ACCUMULATION",
    backward_twice: "ACCUMULATION",
    uneven_parts: "ACCUMULATION",
    sound_in_parts: None,
    decays_each_part: "ACCUMULATION",
    schedules_each_part: "ACCUMULATION",
    clips_each_part: "GRADIENTS",
    steps_each_part: "ACCUMULATION",
}
