"""Batch normalisation over ranks, as functions of one rank: on threads, and under mpirun."""

from __future__ import annotations

import threading

import torch

from hpctrain.comm import World
from hpctrain.train.task.sync_batch_norm import convert_sync_batch_norm

# Samples of each rank: equal, unequal, and none on some.
SHARES = {1: [[5]], 2: [[4, 4], [6, 1], [0, 5]], 3: [[2, 2, 2], [5, 0, 3]], 4: [[1, 1, 1, 1], [3, 0, 7, 2]]}


def build_model() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3),
        torch.nn.BatchNorm2d(3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 4, 5),
        torch.nn.BatchNorm1d(5, momentum=None),
        torch.nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        torch.nn.Linear(5, 1),
    )
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():  # torch's one generator is shared by ranks that are threads
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3 + 0.1)
    return model


def samples(num_samples: int, *, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return 3 + 2 * torch.randn(num_samples, 2, 4, 4, generator=generator, dtype=torch.float64)


def train_steps(
    model: torch.nn.Sequential, *, shares: list[int], mine: slice, world: World | None
) -> dict[str, torch.Tensor]:
    """Two steps of plain descent on this rank's part of each batch; what every tensor of the model became."""
    total = sum(shares)
    found = {}
    for step in range(2):
        inputs = samples(total, step=step)[mine].requires_grad_()
        outputs = model(inputs)
        loss = (outputs.square().sum() + outputs.sin().sum()) / total
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if world is not None:
                world.all_reduce(parameter.grad.view(-1))
            found[f"{name}.grad.{step}"] = parameter.grad.clone()
            parameter.data -= 0.1 * parameter.grad
        # Parts of the batch: compared with the same rows of the one rank's.
        found[f"rows.inputs.{step}"] = inputs.grad
        found[f"rows.outputs.{step}"] = outputs.detach()
    model.eval()
    # Without running statistics, as in the last layer, an evaluated batch is normalised by itself.
    found["rows.evaluated"] = model[:6](samples(total, step=9)[mine]).detach()
    model.train()
    return {**found, **model.state_dict()}


def equals_one_rank(world: World) -> float:
    """Largest difference from torch's own layers with all samples on one rank."""
    worst = 0.0
    for shares in SHARES[world.num_ranks]:
        begin = sum(shares[: world.rank])
        mine = slice(begin, begin + shares[world.rank])
        expected = train_steps(build_model(), shares=shares, mine=slice(0, None), world=None)
        model = build_model()
        convert_sync_batch_norm(model, world.duplicate())
        found = train_steps(model, shares=shares, mine=mine, world=world)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            wanted = expected[name][mine] if name.startswith("rows.") else expected[name]
            assert value.shape == wanted.shape, name
            if value.numel():
                worst = max(worst, float((value.double() - wanted.double()).abs().max()))
        buffers = b"".join(b.numpy().tobytes() for b in model.buffers())
        assert len(set(world.all_gather_bytes(buffers))) == 1, "running statistics differ between ranks"
    return worst


def beside_reductions(world: World) -> float:
    """The same while another thread reduces over a communicator of its own."""
    other = world.duplicate()
    ended = threading.Event()
    counts: list[float] = []

    def reduce() -> None:
        for _ in range(50):
            buffer = torch.ones(1000)
            other.all_reduce(buffer)
            counts.append(float(buffer[0]))
        ended.set()

    thread = threading.Thread(target=reduce)
    thread.start()
    worst = equals_one_rank(world)
    thread.join()
    assert counts == [world.num_ranks] * 50
    return worst
