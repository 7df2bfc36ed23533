"""The section [data] of a recipe: orders, weights, strata and last batches in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import Dataset, pack_arrays, pack_tokens
from hpctrain.data.order.order_spec import BLOCK_BYTES
from hpctrain.data.reading.dataset import read_column
from hpctrain.errors import CheckpointError, DataError, RecipeError, StoppedEarly
from hpctrain.run import parse_recipe
from hpctrain.run.data import default_block, order_of
from hpctrain.run.recipe.schema import DataSection
from tests.unit.run.training_cases import SAMPLES, Task, run

ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "sequential": {"order": "sequential"},
    "blocks": {"order": "blocks", "order_block": 6, "order_window": 3},
    "weighted": {"order": "weighted", "weights": "id"},
    "stratified": {"order": "stratified", "strata": "label"},
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_run_stopped_and_resumed_sees_the_samples_of_an_uninterrupted_one(where: Path, name: str) -> None:
    data = {**ORDERS[name], "global_batch": 18, "last_batch": "pad", "held_out": None}
    data = {key: value for key, value in data.items() if value is not None}
    whole = Task()
    run(where, whole, run={"directory": str(where / "whole")}, data=data)
    first, second = Task(stop_after=4), Task()
    with pytest.raises(StoppedEarly):
        run(where, first, data=data)
    run(where, second, data=data)
    assert first.seen + second.seen == whole.seen
    if name == "weighted":
        assert 0 not in whole.seen  # its weight is 0
    else:
        assert sorted(whole.seen[:SAMPLES]) == list(range(SAMPLES))
    other = {"order": "blocks", "order_block": 5} if name != "blocks" else {"order": "sequential"}
    kept = {key: value for key, value in data.items() if key not in ORDERS[name]}
    with pytest.raises(CheckpointError, match="its position in the data is not valid in this run"):
        run(where, Task(), run={"steps": 20}, data={**kept, **other})


class Seeded(Task):
    """Its first parameters do not depend on torch's generator, which all threads share."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.2 - 0.1)
        return model


class Mean(Seeded):
    """The samples' mean, with a loss that must leave out by itself what only fills a batch."""

    def loss(  # type: ignore[override]
        self, model: torch.nn.Module, fields: dict[str, torch.Tensor], *, valid: torch.Tensor
    ) -> torch.Tensor:
        self.sizes = {*getattr(self, "sizes", set()), len(valid)}
        losses = functional.cross_entropy(model(fields["image"]), fields["label"], reduction="none")
        return (losses * valid).sum() / valid.sum()


def test_a_filled_last_batch_trains_as_a_smaller_one_does_on_one_rank_and_on_three(where: Path) -> None:
    found = {}
    for ranks in (1, 3):
        for last, kind in (("keep", Seeded), ("pad", Seeded), ("pad", Mean)):
            place = f"{ranks}-{last}-{kind.__name__}"

            def one(world: Any, place: str = place, last: str = last, kind: type[Task] = kind) -> Any:
                task = kind()
                reported = run(
                    where,
                    task,
                    world=world,
                    run={"directory": str(where / place), "epochs": 2, "steps": None},
                    data={"global_batch": 48, "last_batch": last},
                )
                return reported["loss"], getattr(task, "sizes", None)

            losses = [one(None)] if ranks == 1 else run_threads(ranks, one, timeout_s=300)
            found[place] = losses[0][0]
            if kind is Mean:
                assert losses[0][1] == {48 // ranks}
    values = list(found.values())
    assert values == pytest.approx([values[0]] * len(values), rel=1e-5)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"order": "random"}, "data.order: found \"random\": input should be 'shuffle', 'blocks'"),
        (
            {"order": "blocks", "shuffle": False},
            "order = 'blocks' and shuffle = false: leave one of the two out",
        ),
        ({"order": "weighted"}, "weights and order = 'weighted' belong together"),
        ({"strata": "label"}, "strata and order = 'stratified' belong together"),
        ({"order_window": 0}, "data.order_window"),
        ({"on_damage": "skip"}, "on_damage = 'skip' needs check = 'first-epoch'"),
        ({"io": "collective", "check": "always"}, "io = 'collective' needs check = 'off'"),
        ({"stage": "/tmp", "memory_store": True}, "stage cannot be combined with"),
        ({"workers": 2}, "workers run a transform"),
        ({"transform": "no colon"}, "data.transform"),
    ],
)
def test_data_settings_that_do_not_fit_are_refused(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({
            "run": {"directory": "x", "epochs": 1}, "task": {"target": "a:b"},
            "data": {"train": "d", "global_batch": 8, **data},
        })  # fmt: skip
    assert expected in str(caught.value)


def test_a_column_comes_from_a_field_or_from_a_file(tmp_path: Path) -> None:
    weight = np.linspace(0, 1, 50, dtype=np.float32)
    pack_arrays(
        tmp_path / "d", {"x": np.zeros((50, 3)), "weight": weight, "w1": weight[:, None]}, shard_samples=20
    )
    dataset = Dataset.open(tmp_path / "d")
    np.save(tmp_path / "w.npy", weight[::-1])
    np.save(tmp_path / "short.npy", weight[1:])
    np.save(tmp_path / "objects.npy", np.array([{}] * 50), allow_pickle=True)
    assert np.array_equal(read_column(dataset, "weight"), weight)
    assert np.array_equal(read_column(dataset, "w1"), weight)
    assert np.array_equal(read_column(dataset, str(tmp_path / "w.npy")), weight[::-1])
    for source, message in (
        ("x", r"field 'x' of .* has shape \(3,\) in each sample: one number is needed"),
        ("y", "'y' is not a field of .*, which has x, weight, w1, nor a .npy file"),
        (str(tmp_path / "short.npy"), r"float32 of shape \(49,\); one number for each of the 50 samples"),
        (str(tmp_path / "objects.npy"), "cannot be read as an array: Object arrays cannot be loaded"),
        (str(tmp_path / "none.npy"), "none.npy cannot be read as an array"),
    ):
        with pytest.raises(DataError, match=message):
            read_column(dataset, source)
    section = DataSection(train="d", global_batch=4, order="weighted", weights="weight")
    drawn = order_of(section, dataset).for_epoch(0, num_samples=50, seed=1).at(0, 50)
    assert 0 not in drawn


def test_a_block_is_by_default_what_fills_four_mebibytes(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "d", {"x": np.zeros((10, 32, 32)), "y": np.zeros(10, np.int64)})
    pack_tokens(tmp_path / "t", iter([np.arange(1000, dtype=np.int32)]), window=64, stride=16, dtype="int32")
    assert default_block(Dataset.open(tmp_path / "d")) == BLOCK_BYTES // (32 * 32 * 8 + 8)
    assert default_block(Dataset.open(tmp_path / "t")) == BLOCK_BYTES // (16 * 4)
    section = DataSection(train="d", global_batch=4, order="blocks")
    assert order_of(section, Dataset.open(tmp_path / "d")).name == "blocks-1 of 511 samples within 64"


# ------------------------------------------------------------------ how data are read


def halve(arrays: dict[str, Any]) -> dict[str, Any]:
    """A transform for `test_data_are_read_as_the_recipe_says`."""
    return {**arrays, "image": arrays["image"] / 2}


def test_data_are_read_as_the_recipe_says(where: Path) -> None:
    def loss(place: str, **data: Any) -> float:
        return float(run(where, Task(), run={"directory": str(where / place), "steps": 3}, data=data)["loss"])

    plain = loss("plain")
    assert loss("read", io="read", cache_mb=0.0, check="first-epoch", on_damage="skip") == plain
    assert loss("staged", stage=str(where / "near"), stage_gb=1.0, check="always") == plain
    name = f"{__name__}:halve"
    halved = loss("halved", transform=name, held_out_transform=name)
    assert halved != plain
    assert loss("workers", transform=name, held_out_transform=name, workers=1) == halved


def test_a_damaged_block_ends_a_run_that_checks_or_is_counted_and_left_out(where: Path) -> None:
    entry = Dataset.open(where / "data").manifest.shards[0]
    offset = entry.fields["label"].offset
    with (where / "data" / entry.file).open("r+b") as file:
        file.seek(offset or 0)
        byte = file.read(1)[0]
        file.seek(offset or 0)
        file.write(bytes([byte ^ 2]))
    data = {"check": "first-epoch", "held_out": str(where / "data")}
    with pytest.raises(DataError, match="field 'label', samples 0 to 99"):
        run(where, Task(), data=data)
    with pytest.raises(DataError, match="are damaged: restore the dataset"):
        run(where, Task(), run={"directory": str(where / "skip")}, data={**data, "on_damage": "skip"})
    reported = run(where, Task(), run={"directory": str(where / "off")}, data={"check": "off"})
    assert reported["step"] == 10
