"""Loops of one's own, sound and each with one fault, for `session.check`. Run on ranks:
`python -m tests.check.faulty_loops NAME ...` prints a line of JSON for each."""

import contextlib
import json
import os
import random
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpctrain

GLOBAL_BATCH = 16


def data():
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(96, 8, generator=numbers, dtype=torch.float32)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def parts(session, *, sampler=None, dataset=None):
    """Returns model, updater, sampler and loader of a sound loop."""
    torch.manual_seed(0)
    dataset = data() if dataset is None else dataset
    if sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=session.world_size, rank=session.rank, seed=0)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // session.world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model, updater, sampler, loader


def sound(session):
    model, updater, sampler, loader = parts(session)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return loader

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    def evaluate():
        model.eval()
        with torch.no_grad():
            x, y = data()[:GLOBAL_BATCH]
            loss = functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        model.train()
        return {"loss": float(loss)}

    return batches, step, evaluate


def gradients_by_hand(session):
    """Changes .grad on the way to the optimizer, by an operation that leaves the version counter as it is."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)
        updater.step()
        return loss

    return loader, step


def grad_scaler(session):
    model, updater, _, loader = parts(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(updater)
        scaler.update()
        return loss

    return loader, step


def learning_rate(session):
    """Each rank's scheduler sees its own loss."""
    model, updater, _, loader = parts(session)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(updater.optimizer, patience=0, factor=0.5)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        schedule.step(float(loss.detach()))
        return loss

    return loader, step


def no_set_epoch(session):
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return lambda epoch: loader, step


class ContinuedSampler(Sampler):
    """Continues an epoch that was left early, as workers do that nobody tells of a new one."""

    def __init__(self, session, num_samples):
        self.session, self.num_samples = session, num_samples
        self.left = iter(())

    def __len__(self):
        return self.num_samples // self.session.world_size

    def __iter__(self):
        for count in range(len(self)):
            number = next(self.left, None)
            if number is None:
                order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(count))
                self.left = iter(order.tolist()[self.session.rank :: self.session.world_size])
                number = next(self.left)
            yield number


def continued_epoch(session):
    sampler = ContinuedSampler(session, 96)
    model, updater, _, loader = parts(session, sampler=sampler)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return lambda epoch: loader, step


def repeating_sampler(session):
    """Draws with replacement, alike on all ranks: they train on the same samples."""
    sampler = RandomSampler(data(), generator=torch.Generator().manual_seed(1))
    model, updater, _, loader = parts(session, sampler=sampler)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return loader, step


def data_by_rank(session):
    x, y = data().tensors
    model, updater, _, loader = parts(session, dataset=TensorDataset(x + 0.1 * session.rank, y))

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return loader, step


def wrong_accumulation(session):
    """Adds up the gradients of parts of 4 samples without weighing them."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        losses = []
        pieces = list(zip(batch[0].split(4), batch[1].split(4), strict=True))
        for number, (x, y) in enumerate(pieces, start=1):
            loss = functional.cross_entropy(model(x), y)
            if number < len(pieces):
                with updater.no_sync():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        updater.step()
        return torch.stack(losses).mean()

    return loader, step


def backward_twice(session):
    """Accumulates without `no_sync`."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        losses = []
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            loss = functional.cross_entropy(model(x), y) / (len(batch[0]) // 4)
            loss.backward()
            losses.append(loss.detach())
        updater.step()
        return torch.stack(losses).sum()

    return loader, step


def own_generator(session):
    model, updater, _, loader = parts(session)
    generator = random.Random(0)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        (loss * generator.uniform(0.5, 1.5)).backward()
        updater.step()
        return loss

    return loader, step


class Random(Dataset):
    """Adds to each sample what `draw` returns."""

    def __init__(self, draw):
        self.draw, self.samples = draw, data()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        x, y = self.samples[number]
        return x + self.draw(), y


def plain(session, *, sampler=None, dataset=None):
    model, updater, sampler, loader = parts(session, sampler=sampler, dataset=dataset)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return loader, step


def numpys_global(session):
    return plain(session, dataset=Random(lambda: float(np.random.rand())))


def pythons_global(session):
    return plain(session, dataset=Random(random.random))


def torchs_global(session):
    return plain(session, dataset=Random(lambda: torch.rand(8, dtype=torch.float32)))


def without_seed(session):
    return plain(session, dataset=Random(lambda: float(np.random.default_rng().random())))


def system_random(session):
    return plain(session, dataset=Random(lambda: os.urandom(1)[0] / 256))


def by_time(session):
    return plain(session, dataset=Random(lambda: time.perf_counter() % 1))


def own_seeded(session):
    return plain(session, dataset=Random(np.random.default_rng(0).random))


class UnseededOrder(Sampler):
    """All samples in an order of no seed, of which each rank takes its part."""

    def __init__(self, session):
        self.session = session

    def __len__(self):
        return 96 // self.session.world_size

    def __iter__(self):
        order = np.random.default_rng().permutation(96).tolist()
        return iter(order[self.session.rank :: self.session.world_size])


def unseeded_order(session):
    return plain(session, sampler=UnseededOrder(session))


def no_step(session):
    """Computes gradients, and never calls the updater."""
    model, _, _, loader = parts(session)

    def step(batch):
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        model.zero_grad()
        return loss

    return loader, step


def in_parts(batch, count):
    return zip(batch[0].chunk(count), batch[1].chunk(count), strict=True)


def accumulated(session, *, after_part=lambda model, updater, count: None):
    """Accumulates over `micro_batches` equal parts. after_part: called after each part's backward."""
    model, updater, _, loader = parts(session)

    def step(batch, *, micro_batches=1):
        updater.zero_grad()
        total = 0.0
        for number, (x, y) in enumerate(in_parts(batch, micro_batches), start=1):
            loss = functional.cross_entropy(model(x), y) / micro_batches
            with contextlib.nullcontext() if number == micro_batches else updater.no_sync():
                loss.backward()
            after_part(model, updater, number)
            total += float(loss.detach())
        updater.step()
        return total

    return loader, step


def sound_in_parts(session):
    return accumulated(session)


def decays_each_part(session):
    """Weight decay by hand after each micro-batch."""

    def decay(model, updater, number):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    return accumulated(session, after_part=decay)


def schedules_each_part(session):
    """Steps its scheduler after each micro-batch."""
    made = []

    def schedule(model, updater, number):
        if not made:
            made.append(torch.optim.lr_scheduler.ExponentialLR(updater.optimizer, 0.5))
        made[0].step()

    return accumulated(session, after_part=schedule)


def clips_each_part(session):
    """Clips the gradients of each micro-batch by themselves."""
    torch.manual_seed(0)
    model, updater, _, loader = parts(session)

    def step(batch, *, micro_batches=1):
        updater.zero_grad()
        total = 0.0
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in in_parts(batch, micro_batches):
            loss = functional.cross_entropy(model(x), y) / micro_batches
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
    model, updater, _, loader = parts(session)

    def step(batch, *, micro_batches=1):
        total = 0.0
        for x, y in in_parts(batch, micro_batches):
            updater.zero_grad()
            loss = functional.cross_entropy(model(x), y) / micro_batches
            loss.backward()
            updater.step()
            total += float(loss.detach())
        return total

    return loader, step


def max_norm(session):
    """Shrinks rows of an embedding in forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 2))
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    share = GLOBAL_BATCH // session.world_size
    rows = torch.randint(0, 20, (96,), generator=torch.Generator().manual_seed(1))

    def step(batch):
        updater.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        updater.step()
        return loss

    return [part[session.rank * share :][:share] for part in rows.split(GLOBAL_BATCH)], step


def rate_by_ranks(session):
    """A learning rate that grows with the number of ranks."""
    model, updater, _, loader = parts(session)
    for group in updater.optimizer.param_groups:
        group["lr"] = 0.05 * session.world_size

    def step(batch):
        updater.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        updater.step()
        return loss

    return loader, step


def kept_gradients(session):
    """Weighs each step by the losses of the steps before, in a list that no checkpoint has."""
    model, updater, _, loader = parts(session)
    kept = []

    def step(batch):
        updater.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        (loss * (1 + sum(kept))).backward()
        kept.append(float(loss.detach()))
        updater.step()
        return loss

    return loader, step


def evaluates_in_training_mode(session):
    """Evaluates without model.eval()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = DistributedSampler(data(), num_replicas=session.world_size, rank=session.rank, seed=0)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // session.world_size, sampler=sampler)

    def step(batch):
        updater.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        updater.step()
        return loss

    def evaluate():
        with torch.no_grad():
            x, y = data()[:GLOBAL_BATCH]
            return {"loss": float(functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y))}

    return loader, step, evaluate


def not_finite_on_one_rank(session):
    """Rank 1 of several gets NaN."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        loss = functional.cross_entropy(model(batch[0] + (float("nan") if session.rank else 0.0)), batch[1])
        loss.backward()
        updater.step()
        return loss

    return loader, step


def tensor_batches(session):
    """A sound loop over tensors: an autoencoder."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = GLOBAL_BATCH // session.world_size
    batches = [part[session.rank * share :][:share] for part in data().tensors[0].split(GLOBAL_BATCH)]

    def step(batch):
        updater.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        updater.step()
        return loss

    return batches, step


def equal_samples(session):
    """A sound loop over few different tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 2))
    updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = GLOBAL_BATCH // session.world_size
    batches = [p[session.rank * share :][:share] for p in torch.arange(160).remainder(20).split(GLOBAL_BATCH)]

    def step(batch):
        updater.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        updater.step()
        return loss

    return batches, step


def replaced_samples(session):
    """Draws with replacement."""
    numbers = torch.Generator().manual_seed(1)
    sampler = RandomSampler(data(), replacement=True, generator=numbers)
    model, updater, _, loader = parts(session, sampler=sampler)

    def step(batch):
        updater.zero_grad()
        x, y = batch
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        updater.step()
        return loss

    return loader, step


def slow_rank(session):
    """A sound loop whose ranks are not equally fast."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        time.sleep(0.05 * session.rank)
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        updater.step()
        return loss

    return loader, step


def looped(session, loss_of, *, model=None, after_step=lambda model, updater, loss: None):
    """A loop around `loss_of(model, x, y)`, with an optimizer that enlarges rounding. Returns also the updater."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)) if model is None else model
    updater = session.distributed_optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    sampler = DistributedSampler(data(), num_replicas=session.world_size, rank=session.rank, seed=0)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // session.world_size, sampler=sampler)

    def step(batch):
        updater.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        updater.step()
        after_step(model, updater, loss.detach())
        return loss

    return loader, step, updater


def entropy(model, x, y):
    return functional.cross_entropy(model(x), y)


def bias_before_batch_norm(session):
    """Sound: the bias of the first layer has no gradient but rounding, which the optimizer enlarges."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return looped(session, entropy, model=session.sync_batch_norm(model))[:2]


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


def one_class(session):
    """A mean over the samples of some classes, of which thirds of a batch may have equally many."""

    def loss_of(model, x, y):
        outputs = model(x)
        return outputs[y > 0].square().mean()

    return looped(session, loss_of)[:2]


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


def uneven_parts(session):
    """Accumulates parts of 5 samples, and of what is left, with the same weight."""
    model, updater, _, loader = parts(session)

    def step(batch):
        updater.zero_grad()
        pieces = list(zip(batch[0].split(5), batch[1].split(5), strict=True))
        total = 0.0
        for number, (x, y) in enumerate(pieces, start=1):
            loss = functional.cross_entropy(model(x), y) / len(pieces)
            with contextlib.nullcontext() if number == len(pieces) else updater.no_sync():
                loss.backward()
            total += float(loss.detach())
        updater.step()
        return total

    return loader, step


def patient_plateau(session):
    """Each rank's scheduler sees its own loss, and will not act on it before the check has ended."""
    made = []

    def after_step(model, updater, loss):
        if not made:
            made.append(torch.optim.lr_scheduler.ReduceLROnPlateau(updater.optimizer, patience=10))
        made[0].step(float(loss))

    return looped(session, entropy, after_step=after_step)[:2]


def scheduled(session):
    made = []
    loader, step, updater = looped(session, entropy, after_step=lambda *_: made[0].step())
    made.append(torch.optim.lr_scheduler.CosineAnnealingLR(updater.optimizer, 6))
    return loader, step, None, {"scheduler": made[0]}


def unsaved_scheduler(session):
    return scheduled(session)[:2]


def saved_second_model(session):
    """Sound: a teacher that follows the model."""
    torch.manual_seed(0)
    model, teacher = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def loss_of(model, x, y):
        return entropy(model, x, y) + functional.mse_loss(model(x), teacher(x))

    def after_step(model, updater, loss):
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.2)

    loader, step, _ = looped(session, loss_of, model=model, after_step=after_step)
    return loader, step, None, {"teacher": teacher}


def second_model(session):
    """The same, not saved."""
    return saved_second_model(session)[:2]


def rare_coin(session):
    """Skips a layer by a coin of its own, which two steps seldom show."""
    coin = np.random.RandomState(3)

    def loss_of(model, x, y):
        return entropy(model, x, y) * (0.5 if coin.rand() < 0.3 else 1.0)

    return looped(session, loss_of)[:2]


def unused_generator(session):
    """Sound: draws what it does not use."""
    coin = np.random.RandomState(3)

    def loss_of(model, x, y):
        return entropy(model, x, y) + 0.0 * coin.rand()

    return looped(session, loss_of)[:2]


STEPS = 0


def counts_globally(session):
    """Counts its steps in a variable of the script."""

    def loss_of(model, x, y):
        global STEPS
        STEPS += 1
        return entropy(model, x, y) / (1 + STEPS // 4)

    return looped(session, loss_of)[:2]


class Centred(nn.Module):
    """Subtracts a mean of the rank's own samples, in a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 3)
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x):
        outputs = self.body(x)
        centred = outputs - self.center
        if self.training and torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return centred


def center_of_each_rank(session):
    torch.manual_seed(0)
    return looped(session, entropy, model=Centred())[:2]


class Stream(IterableDataset):
    """Sound: always the same batches in the same order."""

    def __init__(self, session):
        self.rank, self.size = session.rank, session.world_size

    def __iter__(self):
        x, y = data().tensors
        for batch in zip(x.split(GLOBAL_BATCH), y.split(GLOBAL_BATCH), strict=True):
            yield tuple(t.chunk(self.size)[self.rank] for t in batch)


def batches_of_one_size(session):
    """Takes batches of one size only, which ranks do not get."""

    def loss_of(model, x, y):
        return entropy(model, x.reshape(GLOBAL_BATCH, 8), y)

    return looped(session, loss_of)[:2]


def sharded(session):
    """Sound: the parameters are split over the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    session.parallelize(model, hpctrain.ParallelPlan(shard="parameters"))
    return looped(session, entropy, model=model)[:2]


def fixed_stream(session):
    return DataLoader(Stream(session), batch_size=None), looped(session, entropy)[1]


class ShuffledStream(Stream):
    """Other batches in each epoch, of which persistent workers do not get the number."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch))
        for rows in order.split(GLOBAL_BATCH):
            yield tuple(t[rows.chunk(self.size)[self.rank]] for t in data().tensors)


def persistent_workers(session):
    loader = DataLoader(ShuffledStream(session), batch_size=None, num_workers=1, persistent_workers=True)
    return loader, looped(session, entropy)[1]


def new_workers(session):
    """Sound: the workers of each epoch get its number."""
    return DataLoader(ShuffledStream(session), batch_size=None, num_workers=1), looped(session, entropy)[1]


def main() -> None:
    with hpctrain.init(timeout_s=300) as session:
        for name in sys.argv[1:]:
            report = session.check(globals()[name], show=False)
            if session.rank == 0:
                found = [f.cause.name for f in report.findings if f.is_difference]
                text = "\n".join(report.lines())
                print(
                    json.dumps({"name": name, "equal": report.equal, "causes": found, "text": text}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
