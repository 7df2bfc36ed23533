"""What ranks do in test_ssp: trainings with a parameter server over MPI's one-sided operations."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint import SaveOptions
from hpctrain.comm import World
from hpctrain.data import FieldSpec
from hpctrain.errors import UsageError
from hpctrain.reduce import Ssp, SspUpdater
from hpctrain.run import Session
from hpctrain.train import Position
from tests.sessions import session_over

GLOBAL_BATCH, NUM_SAMPLES = 8, 37


def stamped_reads(world: World, staleness: int | str, servers: list[int], num_parts: int) -> dict[str, Any]:
    """Each update adds 1 to every parameter: what was read is compared with its stamp. The speeds of ranks differ."""
    chance = random.Random(world.rank)
    model = torch.nn.Linear(500, 40, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = Ssp(staleness=staleness, servers=tuple(servers) or "all")
    updater = SspUpdater(optimizer, world=world, schedule=schedule, model=model)
    num_steps = num_parts // updater.num_workers
    wrong, stalenesses = 0, [0] * 100
    taken = []
    while (part := updater.take(until=num_steps)) is not None:
        read = updater.last_read
        assert read is not None
        shares = set(torch.unique_consecutive(model.weight.detach().flatten()).tolist())
        # Every element is of a version that was read, and none is older than the bound.
        oldest = int(min(shares))
        wrong += not shares <= set(read.versions)
        wrong += not (staleness == "any" or oldest >= part.clock - int(staleness))
        stalenesses[min(99, max(0, part.clock - oldest))] += 1
        taken.append(part.clock * updater.num_workers + part.index)
        if chance.random() < 0.02:
            time.sleep(0.005 * chance.random() * (1 + world.rank))
        updater.backward(-model.weight.sum(), weight=1 / updater.num_workers)
        updater.step()
    updater.complete(num_steps)
    final = model.weight.detach()
    found = {
        "wrong": wrong, "reads": len(taken), "taken": taken, "stalenesses": stalenesses,
        "largest": updater.figures.largest_staleness, "repeated": updater.figures.num_repeated,
        "final": bool((final - num_steps).abs().max() < 1e-9 * num_steps),
    }  # fmt: skip
    updater.close()
    updater.free()
    return found


class Rows:
    """Samples of five numbers, which depend on the index."""

    is_thread_safe = True
    num_samples = NUM_SAMPLES
    fields = {"x": FieldSpec(dtype="float64", shape=(5,)), "number": FieldSpec(dtype="int64", shape=())}  # noqa: RUF012

    def gather(self, indices: Any, *, out: Any = None) -> dict[str, Any]:
        rows = np.sin(np.arange(5)[None, :] + 3.7 * np.asarray(indices)[:, None])
        found = {"x": rows, "number": np.asarray(indices, dtype=np.int64)}
        for name, values in found.items():
            if out is not None and name in out:
                out[name][...] = values
        return found


torch.manual_seed(5)
FIRST_MODEL = torch.nn.Sequential(torch.nn.Linear(5, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).double()


def everything(world: World, scratch: str) -> dict[str, Any]:
    """All cases of sessions in one launch."""
    with session_over(world) as session:
        folder = Path(scratch) / f"of-{world.num_ranks}"
        uninterrupted = Served(session, staleness=0)
        uninterrupted.run([11])
        halved = Served(session, staleness=0)
        halved.run([6])
        halved.save(folder)
        resumed = Served(session, staleness=0)
        resumed.load(folder)
        resumed.run([5])
        synchronous = Served(session, staleness=None)
        synchronous.run([11])
        found = {
            "uninterrupted": uninterrupted.parameters(),
            "resumed": resumed.parameters(),
            "synchronous": synchronous.parameters(),
            "position": [resumed.position.step, resumed.position.epoch, resumed.position.start],
            "position of synchronous": [
                synchronous.position.step, synchronous.position.epoch, synchronous.position.start,
            ],
        }  # fmt: skip
        stale = Served(session, staleness=2)
        stale.run([7, 4], slow_rank=world.num_ranks - 1)
        stale.save(folder / "stale")
        found["used"] = stale.used
        found["stale"] = stale.parameters()
        loaded = Served(session, staleness=None)  # a synchronous training continues from it
        loaded.load(folder / "stale")
        found["stale, loaded"] = loaded.parameters()
        found["samples"] = stale.position.samples
        if world.num_ranks > 1:
            listed = Served(session, staleness=0, servers=[world.num_ranks - 1])
            listed.run([6])
            listed.save(folder / "listed")
            listed.run([5])
            again = Served(session, staleness=0, servers=[world.num_ranks - 1])
            again.load(folder / "listed")
            again.run([5])
            found["listed"], found["listed, resumed"] = listed.parameters(), again.parameters()
            found["used by listed"] = listed.used
        return found


class Served:
    """A training of the session: with a parameter server, or synchronous if `staleness` is None."""

    def __init__(self, session: Session, *, staleness: int | None, servers: list[int] | str = "all") -> None:
        self._session = session
        self.model = copy.deepcopy(FIRST_MODEL)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options: dict[str, Any] = {"algorithm": "direct"}
        if staleness is not None:
            options = {"schedule": {"method": "ssp", "staleness": staleness, "servers": servers}}
        self.updater = session.distributed_optimizer(self.model, optimizer, **options)
        self.loader = session.loader(Rows(), global_batch=GLOBAL_BATCH, seed=3)
        self.position = Position()
        self.used: list[list[int]] = []

    def run(self, steps: list[int], *, slow_rank: int = -1) -> None:
        for count in steps:
            if isinstance(self.updater, SspUpdater):
                batches = self._session.shared_batches(
                    self.updater, self.loader, position=self.position, steps=count
                )
                for batch in batches:
                    self._step(batch)
                    if self._session.rank == slow_rank:
                        time.sleep(0.01)
                self.position = batches.position
                continue
            for _ in range(count):
                if self.loader.remaining_batches(start=self.position.start) == 0:
                    self.position = self.position.next_epoch()
                with self.loader.epoch(self.position.epoch, start=self.position.start) as batches_of_epoch:
                    batch = next(batches_of_epoch)
                self._step(batch)
                self.position = self.position.after(batch)

    def _step(self, batch: Any) -> None:
        self.used.append([batch.epoch, *batch["number"].tolist()])
        loss = self.model(batch["x"]).square().sum() / max(1, batch.num_samples)
        self.updater.backward(loss, weight=batch.weight)
        self.updater.step()

    def save(self, folder: Path) -> None:
        self._session.save_state(
            folder, self.updater, self.position, loader=self.loader, options=SaveOptions()
        )

    def load(self, folder: Path) -> None:
        self.position = self._session.load_state(folder, self.updater, loader=self.loader)

    def parameters(self) -> list[list[float]]:
        found = [parameter.detach().flatten().tolist() for parameter in self.model.parameters()]
        self.updater.close()
        return found


def refusals(world: World) -> list[str]:
    """What a session refuses, with the messages."""
    with session_over(world) as session:
        texts = []
        for schedule, options in (
            ({"method": "ssp", "staleness": 1}, {"wire": "fp16"}),
            ({"method": "ssp", "staleness": 1}, {"algorithm": "ring"}),
            ({"method": "ssp", "staleness": 1}, {"clip_norm": 1.0}),
            ({"method": "ssp", "staleness": 1, "servers": [9]}, {}),
            ({"method": "adasum"}, {"wire": "int8"}),
        ):
            model = copy.deepcopy(FIRST_MODEL)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                session.distributed_optimizer(model, optimizer, schedule=schedule, **options)
                texts.append("made")
            except UsageError as error:
                texts.append(str(error))
        plain = session.distributed_optimizer(
            copy.deepcopy(FIRST_MODEL), torch.optim.SGD(FIRST_MODEL.parameters(), 0.1)
        )
        try:
            session.shared_batches(
                plain, session.loader(Rows(), global_batch=8), position=Position(), steps=1
            )
        except UsageError as error:
            texts.append(str(error))
        return texts
