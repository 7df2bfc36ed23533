"""SparseAdam: gradients stay sparse, and any number of ranks trains as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.comm import World
from hpctrain.errors import UsageError
from hpctrain.reduce import LossScale, SparseUpdater
from tests.unit.reduce.data_parallel.updater_cases import on_threads

SAMPLES = 11


class Rows(nn.Module):
    """A table, a bag of rows, and a table that is used in one step only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True).double()
        self.bag = nn.EmbeddingBag(12, 3, sparse=True, mode="sum").double()
        self.rare = nn.Embedding(4, 3, sparse=True).double()
        generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, rows: torch.Tensor, *, with_rare: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.table(rows[:, 0]) * self.bag(rows)
        return found + self.rare(rows[:, 1] % 4) if with_rare else found


def trained(world: World, *, how: str = "weighted", **options: Any) -> dict[str, Any]:
    model = Rows()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)
    updater = SparseUpdater(optimizer, comm=world, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=how == "scaler")
    norms, kept_sparse = [], True
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 12, (SAMPLES, 3), generator=generator)
        mine = rows.tensor_split(world.num_ranks)[world.rank]
        if step == 1:  # one rank has all samples
            mine = rows if world.rank == world.num_ranks - 1 else rows[:0]
        factor = float("inf") if step == 3 and world.rank == world.num_ranks - 1 else 1.0
        share = len(mine) / SAMPLES
        updater.zero_grad()
        if len(mine):
            loss = model(mine, with_rare=step == 2).square().mean() * factor
            if how == "micro-batches":
                with updater.no_sync():
                    updater.backward(loss, weight=share / 2)
                updater.backward(model(mine, with_rare=step == 2).square().mean() * factor, weight=share / 2)
            elif how == "weighted":
                updater.backward(loss, weight=share)
            else:
                scaler.scale(loss * share * world.num_ranks).backward()
        elif how == "scaler":
            scaler.scale(
                torch.ones(())
            )  # makes its scale; in a script with samples on every rank it does so itself
        if how == "scaler":
            scaler.unscale_(updater)  # type: ignore[arg-type]
            kept_sparse &= model.table.weight.grad is None or model.table.weight.grad.is_sparse
            scaler.step(updater)  # type: ignore[arg-type]
            scaler.update()
        else:
            outcome = updater.step(sums={"share": share})
            assert outcome.sums["share"] == pytest.approx(1.0)
            assert outcome.applied == (step != 3)
            norms.append(outcome.grad_norm)
    updater.close()
    assert kept_sparse
    return {"parameters": [p.detach().clone() for p in model.parameters()], "norms": norms}


@pytest.mark.parametrize("how", ["weighted", "micro-batches", "plain", "scaler"])
def test_any_number_of_ranks_trains_as_one(how: str) -> None:
    for options in ({}, {"clip_norm": 0.05}, {"loss_scale": LossScale(value=8.0)}):
        alone = on_threads(1, partial(trained, **options))[0]
        for found in on_threads(3, partial(trained, how=how, **options)):
            for one, other in zip(found["parameters"], alone["parameters"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            if found["norms"]:
                assert found["norms"] == pytest.approx(alone["norms"], rel=1e-10, nan_ok=True)


def test_misuse_is_refused_in_words() -> None:
    def case(world: World) -> None:
        model = Rows()
        updater = SparseUpdater(torch.optim.SparseAdam(list(model.parameters())), comm=world)
        rows = torch.tensor([[1, 2, 3]])
        model(rows).sum().backward()
        with pytest.raises(UsageError, match="synchronize"):
            torch.nn.utils.get_total_norm([model.table.weight.grad])
        with pytest.raises(UsageError, match="ran twice"):
            model(rows).sum().backward()
        model.zero_grad()
        model(rows).sum().backward()  # in place of the first
        updater.step()
        updater.close()
        with pytest.raises(UsageError, match="closed"):
            updater.step()
        dense = nn.Linear(2, 2)
        other = SparseUpdater(torch.optim.SparseAdam(list(dense.parameters())), comm=world)
        dense(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="dense gradient"):
            other.step()

    on_threads(2, case)
