"""What the sound and the faulty loops are made of: data, model, updater and steps."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 16


def data():
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(96, 8, generator=numbers, dtype=torch.float32)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def loader_of(session, *, sampler=None, dataset=None):
    dataset = data() if dataset is None else dataset
    if sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=session.world_size, rank=session.rank, seed=0)
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // session.world_size, sampler=sampler)


def batches_of(session, samples):
    """Returns this rank's part of each global batch of a tensor of samples."""
    share = GLOBAL_BATCH // session.world_size
    return [part[session.rank * share :][:share] for part in samples.split(GLOBAL_BATCH)]


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(session, model, *, momentum=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return session.distributed_optimizer(model, optimizer)


def parts(session, *, sampler=None, dataset=None):
    """Returns model, updater and loader of a sound loop."""
    model = classifier()
    updater = sgd(session, model, momentum=0.9)
    return model, updater, loader_of(session, sampler=sampler, dataset=dataset)


def entropy(model, x, y):
    return functional.cross_entropy(model(x), y)


def step_of(updater, loss_of, *, before_update=lambda: None, after_update=lambda loss: None):
    """Returns a step on `loss_of(batch)`."""

    def step(batch):
        updater.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        before_update()
        updater.step()
        after_update(loss.detach())
        return loss

    return step


def plain(session, *, sampler=None, dataset=None):
    """Returns loader and step of a sound loop, over other samples."""
    model, updater, loader = parts(session, sampler=sampler, dataset=dataset)
    return loader, step_of(updater, lambda batch: entropy(model, *batch))


def looped(session, loss_of, *, model=None, after_step=lambda model, updater, loss: None):
    """A loop around `loss_of(model, x, y)`, with an optimizer that enlarges rounding. Returns also the updater."""
    model = classifier() if model is None else model
    updater = session.distributed_optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    step = step_of(
        updater,
        lambda batch: loss_of(model, *batch),
        after_update=lambda loss: after_step(model, updater, loss),
    )
    return loader_of(session), step, updater
