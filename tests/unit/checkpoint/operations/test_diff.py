"""In what two checkpoints differ: tensors, by how much, and entries of the document, at any number of ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import Replicated, State, save
from hpctrain.checkpoint.format.tensor_difference import Amount, Tolerance
from hpctrain.checkpoint.operations.diff import Difference, compare, compare_json
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError
from tests.unit.checkpoint.states import state_of, whole_tensors


def saved(directory: Path, tensors: dict[str, torch.Tensor], *, step: int = 1, **document: object) -> Path:
    items = [Replicated(name=name, tensor=tensor) for name, tensor in tensors.items()]
    return save(
        State(items=items, document=document), directory=directory, step=step, comm=SerialWorld()
    ).path


def saved_by(ranks: int, directory: Path, tensors: dict[str, torch.Tensor], **options: object) -> Path:
    def rank_main(world: World) -> Path:
        return save(
            state_of(world.rank, ranks, tensors=tensors), directory=directory, step=1, comm=world, **options
        ).path

    return run_threads(ranks, rank_main, timeout_s=300)[0]


def difference(first: Path, second: Path, **options: object) -> Difference:
    return compare(first, second, comm=SerialWorld(), **options)


def amounts(found: Difference) -> dict[str, Amount | None]:
    return {entry.name: entry.amount for entry in found.changed}


def test_the_same_state_saved_by_other_ranks_in_other_files_does_not_differ(tmp_path: Path) -> None:
    tensors = whole_tensors()
    one = saved_by(2, tmp_path / "one", tensors)
    found = difference(one, saved_by(3, tmp_path / "two", tensors, files=2))
    assert found.is_empty
    assert found.num_same == len(tensors)


def test_alike_tensors_with_alike_hashes_are_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "one", {"a": torch.arange(10)})
    other = saved(tmp_path / "two", {"a": torch.arange(10)})
    place = path.read_bytes().index(torch.arange(10).numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    assert difference(path, other).is_empty  # as saved; what happened since is for `verify`


def test_damage_in_what_is_read_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "one", {"a": torch.arange(10)})
    place = path.read_bytes().index(torch.arange(10).numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="damaged: tensor 'a'"):
        difference(path, saved(tmp_path / "two", {"a": torch.arange(1, 11)}))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_how_much_is_said_in_numbers_and_is_the_same_at_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(
        "hpctrain.checkpoint.operations.diff.REGION_BYTES", 4096
    )  # several regions per tensor
    made = torch.Generator().manual_seed(1)
    first = torch.randn(40, 70, generator=made, dtype=torch.float64)
    second = first.clone()
    second[3, 5] += 2.5
    second[39] -= 0.5
    one = saved(tmp_path / "one", {"x": first, "y": first}, epoch=1)
    two = saved(tmp_path / "two", {"x": second, "y": first}, step=2, epoch=1)
    results = run_threads(num_ranks, lambda world: compare(one, two, comm=world), timeout_s=300)
    for found in results:
        assert found.num_same == 1
        assert not found.entries  # another step is no difference
        amount = amounts(found)["x"]
        assert amount is not None
        assert (amount.num_elems, amount.num_different, amount.num_beyond) == (2800, 71, 71)
        assert amount.max_abs == pytest.approx(2.5)
        assert amount.relative == pytest.approx(float((second - first).norm() / first.norm()))


def test_bits_count_and_values_that_are_no_numbers_are_counted_apart(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    one = saved(tmp_path / "one", {"x": torch.tensor([nan, 0.0, inf, 1.0, nan])})
    two = saved(tmp_path / "two", {"x": torch.tensor([nan, -0.0, 2.0, 1.5, 3.0])})
    amount = amounts(difference(one, two))["x"]
    assert amount is not None
    assert (amount.num_different, amount.num_not_finite, amount.max_abs) == (4, 2, 0.5)
    within = amounts(difference(one, two, tolerance=Tolerance(absolute=0.6)))["x"]
    assert within is not None
    assert (within.num_different, within.num_beyond) == (4, 2)  # not a finite number: never within


def test_a_tolerance_makes_near_tensors_the_same(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", {"x": torch.tensor([1.0, 100.0])})
    two = saved(tmp_path / "two", {"x": torch.tensor([1.0, 100.5])})
    assert difference(one, two, tolerance=Tolerance(relative=0.006)).is_empty
    assert not difference(one, two, tolerance=Tolerance(relative=0.004)).is_empty
    assert difference(one, two, tolerance=Tolerance(absolute=0.5)).is_empty


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "uint64", "float16", "bfloat16", "float8_e4m3fn", "complex64", "complex128"]
)  # fmt: skip
def test_every_kind_of_number_is_compared(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    first, second = torch.zeros(9).to(kind), torch.tensor([1.0, *[0.0] * 8]).to(kind)
    one, two = saved(tmp_path / "one", {"x": first}), saved(tmp_path / "two", {"x": second})
    amount = amounts(difference(one, two))["x"]
    assert amount == Amount(num_elems=9, num_different=1, num_beyond=1, max_abs=1.0, squares=1.0)


def test_a_type_without_plain_numbers_is_compared_by_its_bits(tmp_path: Path) -> None:
    pairs = torch.arange(4, dtype=torch.uint8)
    one = saved(tmp_path / "one", {"x": pairs.view(torch.float4_e2m1fn_x2)})
    two = saved(tmp_path / "two", {"x": pairs.flip(0).view(torch.float4_e2m1fn_x2)})
    amount = amounts(difference(one, two))["x"]
    assert amount is not None
    assert (amount.num_different, amount.max_abs) == (4, 0.0)


def test_other_shapes_types_and_names_are_differences(tmp_path: Path) -> None:
    one = saved(
        tmp_path / "one",
        {"a": torch.zeros(4), "b": torch.ones(3), "gone": torch.ones(1), "0": torch.ones(())},
    )
    two = saved(
        tmp_path / "two",
        {"a": torch.zeros(2, 2), "b": torch.ones(3).bfloat16(), "new": torch.ones(1), "0": torch.ones(())},
    )
    found = difference(one, two)
    assert (found.only_in_first, found.only_in_second, found.num_same) == (("gone",), ("new",), 1)
    assert [(e.name, e.first, e.second) for e in found.changed] == [
        ("a", "float32 [4]", "float32 [2, 2]"),
        ("b", "float32 [3]", "bfloat16 [3]"),
    ]
    assert amounts(found)["a"] is None
    assert asdict(amounts(found)["b"] or Amount())["num_different"] == 0  # the values are the same


def test_a_prefix_leaves_the_rest_out(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", {"model/a": torch.zeros(4), "b": torch.ones(3)}, epoch=1)
    two = saved(tmp_path / "two", {"model/a": torch.zeros(4), "b": torch.zeros(3)}, epoch=2)
    assert difference(one, two, prefix="model/").is_empty
    assert not difference(one, two).is_empty
    with pytest.raises(CheckpointError, match="no tensor under 'modul/'"):
        difference(one, two, prefix="modul/")


def test_entries_of_documents_are_named_by_their_path() -> None:
    first = {
        "position": {"step": 50, "epoch": 1},
        "groups": [{"lr": 0.1}, 5],
        "old": {"a": 1},
        "same": [1, None],
    }
    second = {"position": {"step": 51, "epoch": 1}, "groups": [{"lr": 0.2}], "new": None, "same": [1, None]}
    found = {e.path: (e.first, e.second) for e in compare_json(first, second)}
    assert found == {
        "groups[0].lr": ("0.1", "0.2"),
        "groups[1]": ("5", None),
        "new": (None, "null"),
        "old": ('{"a": 1}', None),
        "position.step": ("50", "51"),
    }
