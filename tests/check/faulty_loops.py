"""Loops of one's own, sound and each with one fault, for `session.check`. Run on ranks:
`python -m tests.check.faulty_loops NAME ...` prints a line of JSON for each."""

import json
import random
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset
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
        sampler = DistributedSampler(dataset, num_replicas=session.num_ranks, rank=session.rank, seed=0)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // session.num_ranks, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    updater = session.updater(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
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
        return self.num_samples // self.session.num_ranks

    def __iter__(self):
        for count in range(len(self)):
            number = next(self.left, None)
            if number is None:
                order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(count))
                self.left = iter(order.tolist()[self.session.rank :: self.session.num_ranks])
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


def tensor_batches(session):
    """A sound loop over tensors: an autoencoder."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    updater = session.updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = GLOBAL_BATCH // session.num_ranks
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
    updater = session.updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = GLOBAL_BATCH // session.num_ranks
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


def main() -> None:
    with hpctrain.start(timeout_s=300) as session:
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
