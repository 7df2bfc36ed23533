"""Loops whose fault is in what samples the ranks get, in which order, and what is drawn at random."""

import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from tests.check.loops import (
    GLOBAL_BATCH,
    batches_of,
    data,
    entropy,
    looped,
    parts,
    plain,
    sgd,
    step_of,
)


def tensor_batches(session):
    """A sound loop over tensors: an autoencoder."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = step_of(sgd(session, model), lambda batch: (model(batch) - batch).square().mean())
    return batches_of(session, data().tensors[0]), step


def equal_samples(session):
    """A sound loop over few different tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 2))
    step = step_of(sgd(session, model), lambda batch: model(batch).square().mean())
    return batches_of(session, torch.arange(160).remainder(20)), step


def no_set_epoch(session):
    loader, step = plain(session)
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
    loader, step = plain(session, sampler=ContinuedSampler(session, 96))
    return lambda epoch: loader, step


def repeating_sampler(session):
    """Draws the same order on all ranks: they train on the same samples."""
    return plain(session, sampler=RandomSampler(data(), generator=torch.Generator().manual_seed(1)))


def replaced_samples(session):
    """Draws with replacement."""
    numbers = torch.Generator().manual_seed(1)
    return plain(session, sampler=RandomSampler(data(), replacement=True, generator=numbers))


def data_by_rank(session):
    x, y = data().tensors
    return plain(session, dataset=TensorDataset(x + 0.1 * session.rank, y))


class Random(Dataset):
    """Adds to each sample what `draw` returns."""

    def __init__(self, draw):
        self.draw, self.samples = draw, data()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        x, y = self.samples[number]
        return x + self.draw(), y


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
    """All samples in an order without a seed, of which each rank takes its part."""

    def __init__(self, session):
        self.session = session

    def __len__(self):
        return 96 // self.session.world_size

    def __iter__(self):
        order = np.random.default_rng().permutation(96).tolist()
        return iter(order[self.session.rank :: self.session.world_size])


def unseeded_order(session):
    return plain(session, sampler=UnseededOrder(session))


def own_generator(session):
    model, updater, loader = parts(session)
    generator = random.Random(0)

    def step(batch):
        updater.zero_grad()
        loss = entropy(model, *batch)
        (loss * generator.uniform(0.5, 1.5)).backward()
        updater.step()
        return loss

    return loader, step


def rare_coin(session):
    """Skips a layer by a coin of its own, which two steps seldom show."""
    coin = np.random.RandomState(3)
    return looped(session, lambda model, x, y: entropy(model, x, y) * (0.5 if coin.rand() < 0.3 else 1.0))[:2]


def unused_generator(session):
    """Sound: draws what it does not use."""
    coin = np.random.RandomState(3)
    return looped(session, lambda model, x, y: entropy(model, x, y) + 0.0 * coin.rand())[:2]


class Stream(IterableDataset):
    """Sound: always the same batches in the same order."""

    def __init__(self, session):
        self.rank, self.size = session.rank, session.world_size

    def __iter__(self):
        x, y = data().tensors
        for batch in zip(x.split(GLOBAL_BATCH), y.split(GLOBAL_BATCH), strict=True):
            yield tuple(t.chunk(self.size)[self.rank] for t in batch)


def fixed_stream(session):
    return DataLoader(Stream(session), batch_size=None), looped(session, entropy)[1]


class ShuffledStream(Stream):
    """Other batches in each epoch, whose number persistent workers do not get."""

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


def batches_of_one_size(session):
    """Takes batches of one size only, which ranks do not get."""
    return looped(session, lambda model, x, y: entropy(model, x.reshape(GLOBAL_BATCH, 8), y))[:2]


CAUSES = {
    tensor_batches: None,
    equal_samples: None,
    no_set_epoch: "DATA_ORDER",
    continued_epoch: "DATA_ORDER",
    persistent_workers: "DATA_ORDER",
    new_workers: None,
    fixed_stream: None,
    batches_of_one_size: "REFUSED",
    repeating_sampler: "REPEATED",
    replaced_samples: "REPEATED",
    data_by_rank: "DATA_BY_RANK",
    numpys_global: "OWN_RANDOM",
    pythons_global: "OWN_RANDOM",
    torchs_global: "OWN_RANDOM",
    without_seed: "OWN_RANDOM",
    system_random: "OWN_RANDOM",
    by_time: "OWN_RANDOM",
    own_seeded: "OWN_RANDOM",
    unseeded_order: "OWN_RANDOM",
    own_generator: "OWN_RANDOM",
    rare_coin: "OWN_RANDOM",
    unused_generator: None,
}
