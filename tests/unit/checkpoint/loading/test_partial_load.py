"""Parts of a checkpoint: some tensors, other names, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import PartialLoad, Replicated, State, TensorShard, load_partial, load_weights, save
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError
from tests.unit.checkpoint.states import same_bits


def network(*, hidden: int = 4, seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(3, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 2)]
    return torch.nn.Sequential(*layers)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run saves, shortened: the model, an optimizer's tensors, and shards."""
    rows = torch.arange(20.0).reshape(10, 2)
    weights = network().state_dict()  # not in the threads: they share a generator

    def rank_main(world: World) -> Path:
        items: list[Replicated | TensorShard] = [
            Replicated(name=f"model/{name}", tensor=tensor) for name, tensor in weights.items()
        ]
        items.append(Replicated(name="optimizer/0.weight::exp_avg", tensor=torch.ones(4, 3)))
        first = 5 * world.rank
        items.append(
            TensorShard(name="rows", tensor=rows[first : first + 5], global_shape=(10, 2), offset=(first, 0))
        )
        return save(State(items=items), directory=directory, step=1, comm=world, files=2).path

    directory = tmp_path_factory.mktemp("checkpoints")
    return run_threads(2, rank_main, timeout_s=300)[0]


def test_weights_alone_are_loaded_into_a_model(path: Path) -> None:
    models = [network(seed=2), network(seed=3)]

    def rank_main(world: World) -> tuple[torch.nn.Module, PartialLoad]:
        return models[world.rank], load_weights(models[world.rank], path, comm=world)

    expected = network().state_dict()
    for model, report in run_threads(2, rank_main, timeout_s=300):
        assert report.fits
        assert "9 tensors of " in report.describe()
        assert list(report.tensors) == sorted(expected)
        for name, tensor in model.state_dict().items():
            assert same_bits(tensor, expected[name]), name


def test_nothing_else_of_the_checkpoint_is_read(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / path.name
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for piece in read_structure(path).metadata.tensors["rows"].pieces:
        with open(folder / f"data-{piece.file:05d}.h5", "r+b") as file:
            file.seek(piece.file_offset)
            file.write(b"\xff" * 8)
    assert load_weights(network(seed=2), folder, comm=SerialWorld()).fits
    with pytest.raises(CheckpointError, match=r"damaged: tensor 'rows', bytes \d+ to \d+ of data-00000\.h5"):
        load_partial(folder, comm=SerialWorld(), names=["rows"], strict=False)


def test_differences_are_an_error_that_lists_them_and_changes_nothing(path: Path) -> None:
    model = torch.nn.Sequential(*network(hidden=5, seed=2), torch.nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def rank_main(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_weights(model, path, comm=world)
        assert caught.value.agreed
        return str(caught.value)

    texts = run_threads(2, rank_main, timeout_s=300)
    assert texts[0] == texts[1]
    assert "2 missing in the checkpoint: 3.bias, 3.weight" in texts[0]
    assert "0.bias is float32 [4] in the checkpoint, float32 [5] in this program" in texts[0]
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_being_strict_what_fits_is_loaded_and_the_rest_is_reported(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 7))
    report = load_weights(model, path, comm=SerialWorld(), strict=False)
    assert [mismatch.name for mismatch in report.mismatched] == ["2.bias", "2.weight"]
    assert (report.missing, report.unexpected) == ((), ())
    assert same_bits(model[0].weight.detach(), network()[0].weight.detach())
    smaller = load_weights(torch.nn.Sequential(torch.nn.Linear(3, 4)), path, comm=SerialWorld(), strict=False)
    assert "model/2.weight" in smaller.unexpected
    assert "not wanted by this program: model/1.bias" in smaller.describe()


def test_names_are_mapped_by_a_table_and_by_a_function(path: Path) -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 4), "last": torch.nn.Linear(4, 2)})
    table = {
        f"{a}.{kind}": f"{b}.{kind}"
        for a, b in (("0", "first"), ("2", "last"))
        for kind in ("weight", "bias")
    }
    report = load_weights(model, path, comm=SerialWorld(), rename=table, strict=False)
    assert report.missing == ()
    assert len(report.unexpected) == 5  # the normalization's
    assert same_bits(model["last"].weight.detach(), network()[2].weight.detach())

    def rename(name: str) -> str | None:
        return table.get(name)

    assert load_weights(model, path, comm=SerialWorld(), rename=rename).fits
    with pytest.raises(
        CheckpointError, match=r"both 'model/0.bias' and 'model/0.weight' would be called 'x'"
    ):
        load_partial(path, comm=SerialWorld(), prefix="model/0.", rename=lambda name: "x")


def test_names_and_prefix_choose(path: Path) -> None:
    loaded = load_partial(path, comm=SerialWorld(), prefix="optimizer/")
    assert list(loaded.tensors) == ["0.weight::exp_avg"]
    loaded = load_partial(path.parent, comm=SerialWorld(), names=["rows", "nowhere"], strict=False)
    assert torch.equal(loaded.tensors["rows"], torch.arange(20.0).reshape(10, 2))
    assert loaded.missing == ("nowhere",)
    with pytest.raises(CheckpointError, match="1 missing in the checkpoint: nowhere"):
        load_partial(path, comm=SerialWorld(), names=["nowhere"])


def test_of_a_directory_the_newest_that_is_good_in_what_is_read_is_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    items = [Replicated(name=f"model/{n}", tensor=t) for n, t in network().state_dict().items()]
    for step in (1, 2):
        newest = save(State(items=items), directory=tmp_path, step=step, comm=SerialWorld()).path
    stored = read_structure(newest).metadata.tensors["model/0.bias"]
    with open(newest, "r+b") as file:
        file.seek(stored.pieces[0].file_offset)
        file.write(b"\xff" * 8)

    def rank_main(world: World) -> tuple[int, int]:
        untouched = load_partial(tmp_path, comm=world, names=["model/0.weight"], strict=False)
        return untouched.checkpoint.step, load_weights(
            models[world.rank], tmp_path, comm=world
        ).checkpoint.step

    models = [network(seed=2), network(seed=3)]
    assert run_threads(2, rank_main, timeout_s=300) == [(2, 1), (2, 1)]
    assert capfd.readouterr().err.count("CHECKPOINT REJECTED") == 1
    # That it does not fit is no damage: an older one is not tried.
    with pytest.raises(
        CheckpointError, match=r"step-00000002\.h5 does not fit; 1 missing in the checkpoint: nowhere"
    ):
        load_partial(tmp_path, comm=SerialWorld(), names=["nowhere"], prefix="optimizer/")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load_partial(tmp_path / "empty", comm=SerialWorld())


def test_a_rank_has_only_the_tensors_that_it_reads(path: Path) -> None:
    expected = network().state_dict()

    def rank_main(world: World) -> PartialLoad:
        reads = [name for name in expected if name.startswith("0.") == (world.rank == 0)]
        return load_partial(path, comm=world, prefix="model/", expected=expected, reads=reads)

    first, second = run_threads(2, rank_main, timeout_s=300)
    assert set(first.tensors) == {"0.weight", "0.bias"}
    assert set(second.tensors) == expected.keys() - first.tensors.keys()
    for name, tensor in {**first.tensors, **second.tensors}.items():
        assert same_bits(tensor, expected[name]), name
    # What does not fit is the same on both, and so is what was loaded.
    assert first.describe() == second.describe()
    assert "9 tensors of " in first.describe()
