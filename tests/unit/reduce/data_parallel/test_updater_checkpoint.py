"""What a reducer feeds back is part of the checkpoint, on the ranks that saved it and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import Checkpoint, load, open_checkpoint, save
from hpctrain.comm import World
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.topology import Topology
from hpctrain.train.state.training_state import Position, TrainingState
from tests.unit.reduce.data_parallel.updater_cases import Watched, on_threads, reducer_for

IDENTITY = {"dataset": "none"}


def reducer_with_feedback(world: World) -> BucketReducer:
    topology = Topology.from_node_names([f"n{rank}" for rank in range(world.num_ranks)])
    codec = codec_named("int8")
    return CollectiveReducer.direct(world.duplicate(), topology=topology, codec=codec, feedback=True)


class Run:
    """A model, its optimizer and updater, and steps whose samples follow from step and rank."""

    def __init__(self, world: World, reducer: BucketReducer) -> None:
        generator = torch.Generator().manual_seed(1)
        self.world = world
        self.reducer = Watched(reducer)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 300))
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.updater = AllReduceUpdater(self.optimizer, comm=world, reducer=self.reducer, bucket_bytes=4000)
        self.state = TrainingState(self.model, self.optimizer, self.updater, 0)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.world.rank)
            loss = self.model(torch.randn(5, 7, generator=generator)).pow(2).mean()
            self.updater.backward(loss, weight=1 / self.world.num_ranks)
            self.updater.step()

    def save(self, directory: Path, *, step: int) -> Path:
        state = self.state.capture(Position(step=step), comm=self.world, identity=IDENTITY)
        return save(state, directory=directory, step=step, comm=self.world).path

    def restore(self, path: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
        checkpoint, tensors = load(path, comm=self.world)
        self.state.restore(checkpoint, tensors, comm=self.world, identity=IDENTITY)
        return checkpoint, tensors

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def test_residuals_are_saved_and_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    def case(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        whole = Run(world, reducer_with_feedback(world))
        whole.train(range(3))
        path = whole.save(tmp_path, step=3)
        whole.train(range(3, 6))
        resumed = Run(world, reducer_with_feedback(world))
        _, tensors = resumed.restore(path)
        assert any(name.startswith("updater/") and bool(t.any()) for name, t in tensors.items())
        resumed.train(range(3, 6))
        forgetful = Run(world, reducer_with_feedback(world))
        checkpoint, tensors = load(path, comm=world)
        tensors = {name: t for name, t in tensors.items() if not name.startswith("updater/")}
        forgetful.state.restore(checkpoint, tensors, comm=world, identity=IDENTITY)
        forgetful.train(range(3, 6))
        for run in (whole, resumed, forgetful):
            run.updater.close()
        return whole.parameters(), resumed.parameters(), forgetful.parameters()

    for whole, resumed, forgetful in on_threads(2, case):
        assert all(map(torch.equal, whole, resumed))
        # Without the residuals it goes on too (a checkpoint of another wire), and not to the bit.
        assert not all(map(torch.equal, whole, forgetful))
        for a, b in zip(whole, forgetful, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("feedback", [True, False])
def test_residuals_of_two_ranks_are_offered_to_any_number_and_any_wire(
    tmp_path: Path, num_ranks: int, feedback: bool
) -> None:
    def first(world: World) -> Path:
        run = Run(world, reducer_with_feedback(world))
        run.train(range(3))
        path = run.save(tmp_path, step=3)
        run.updater.close()
        return path

    path = on_threads(2, first)[0]

    def second(world: World) -> tuple[list[torch.Tensor], Any]:
        run = Run(world, reducer_with_feedback(world) if feedback else reducer_for(world))
        run.restore(path)
        assert all(t.shape[0] == 2 for t in run.reducer.loaded[-1].values())
        offered = sorted(run.reducer.loaded[-1])
        run.train(range(3, 5))
        run.updater.close()
        return run.parameters(), offered

    found = on_threads(num_ranks, second)
    for parameters, offered in found:
        assert offered
        assert all(map(torch.equal, parameters, found[0][0]))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_reads_its_share_of_the_residuals_and_no_more(tmp_path: Path, num_ranks: int) -> None:
    def first(world: World) -> tuple[Path, torch.Tensor]:
        run = Run(world, reducer_with_feedback(world))
        run.train(range(3))
        path = run.save(tmp_path, step=3)
        total = sum(load(path, comm=world)[1]["updater/residual"].double())
        run.updater.close()
        return path, total

    path, total = on_threads(2, first)[0]

    def second(world: World) -> tuple[int, torch.Tensor]:
        run = Run(world, reducer_with_feedback(world))
        checkpoint = open_checkpoint(path, comm=world)
        regions = run.state.regions(checkpoint, rank=world.rank)
        checkpoint, tensors = load(path, comm=world, regions=regions)
        run.state.restore(checkpoint, tensors, comm=world, identity=IDENTITY)
        (kept,) = run.reducer.state()
        num_rows = tensors["updater/residual"].shape[0]
        residual = kept.tensor.double().clone()
        run.updater.close()
        return num_rows, residual

    found = on_threads(num_ranks, second)
    assert [rows for rows, _ in found] == [1, 1, 0, 0][:num_ranks]
    torch.testing.assert_close(sum(residual.sum(0) for _, residual in found), total, rtol=1e-5, atol=1e-7)


def test_the_choice_of_algorithms_in_a_checkpoint_of_an_older_version_is_not_used() -> None:
    def case(world: World) -> bool:
        run = Run(world, reducer_for(world))
        saved = {**run.updater.state(), "reduction": {"key": None, "ranges": [], "bucket_bytes": 1}}
        buckets = run.updater.buckets
        run.updater.load_state(saved)
        same = run.updater.buckets == buckets and "reduction" not in run.updater.state()
        run.updater.close()
        return same

    assert on_threads(2, case) == [True, True]
