"""What a run's dropped steps leave: nothing in the buffers, and words about the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from hpctrain.checkpoint import load_partial
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import pack_arrays
from hpctrain.errors import DivergedError
from tests.unit.run.guards.guarded_runs import STEPS, Task, run


class Centred(torch.nn.Module):
    """Counts the samples that it has seen in training, and takes off a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            self.count += len(x)
        return x - self.mean


class CentredTask(Task):
    def build_model(self) -> torch.nn.Module:
        super().build_model()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), Centred(), *list(self.model.children())[1:])
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        logits = model(fields["image"])
        if len(logits) > self.most_rows:
            torch.empty(1 << 50)
        return self.spoil(functional.cross_entropy(logits, fields["label"]), self.calls)


def with_bad_sample(where: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images[:200] / 16).astype("float32")
    images[123, 5] = torch.inf
    pack_arrays(where / "bad", {"image": images, "label": labels[:200].astype("int64")})


def buffers_saved(where: Path) -> dict[str, torch.Tensor]:
    found = load_partial(where / "run" / "checkpoints", comm=SerialWorld(), prefix="model/1.")
    return {name.removeprefix("model/1."): tensor for name, tensor in found.tensors.items()}


def test_one_infinite_sample_costs_its_steps_and_nothing_else(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bad_sample(where)
    found = run(where, CentredTask(), data={"train": str(where / "bad")})
    printed = capsys.readouterr().out
    assert found["status"] == "finished"
    assert 0 < found["skipped_steps"] < STEPS / 2
    assert found["loss"] < 2.3
    assert (
        "is skipped on all ranks: its data are not finite: field 'image', sample 123 on rank 0\n" in printed
    )
    assert f", {found['skipped_steps']} of {STEPS} steps skipped; records in" in printed
    assert "WARNING" not in printed
    assert all(tensor.isfinite().all() for tensor in buffers_saved(where).values())


def test_a_run_that_ends_by_its_data_says_so(where: Path) -> None:
    with_bad_sample(where)
    options = {"max_skipped_in_row": 0}
    with pytest.raises(
        DivergedError, match=r"its data are not finite: field 'image', sample 123 on rank 0\. Repair"
    ) as seen:
        run(
            where,
            CentredTask(),
            data={"train": str(where / "bad")},
            optimizer=options,
            guards={"max_roll_backs": 0},
        )
    assert "optimizer.lr" not in str(seen.value)


def test_a_batch_that_is_computed_again_in_smaller_parts_counts_once(where: Path) -> None:
    task = CentredTask(most_rows=7)
    found = run(where, task)
    assert found["out_of_memory"] > 0
    assert int(buffers_saved(where)["count"]) == found["samples_seen"]


def test_a_checkpoint_that_holds_nan_says_so_once(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = CentredTask()

    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        if step == 8:  # the loss does not depend on it
            task.model.get_submodule("1").register_buffer("extra", torch.tensor(torch.nan))
        return loss

    task.spoil = spoil
    run(where, task)
    printed = capsys.readouterr().out
    assert (
        printed.count(
            "WARNING: the checkpoint of step 10 holds values that are not finite, in buffer '1.extra'"
        )
        == 1
    )
    assert printed.count("WARNING") == 1
