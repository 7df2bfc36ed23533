"""Checkpoints to and from safetensors and torch's state dicts: the same bits, whole or not at all, and no code runs."""

from __future__ import annotations

import json
import os
import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from hpctrain.checkpoint import Replicated, State, load, save
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.loading.restore import load_weights
from hpctrain.checkpoint.operations.diff import compare
from hpctrain.checkpoint.operations.export import SAFETENSORS_DTYPES, export_safetensors, export_state_dict
from hpctrain.checkpoint.operations.import_tensors import import_tensors
from hpctrain.checkpoint.operations.maintenance import copy_checkpoint
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

SERIAL = SerialWorld()


def seen(directory: Path) -> list[str]:
    """Names in a directory but hidden ones: leases lie beside the directories of checkpoints."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def saved(directory: Path, tensors: dict[str, torch.Tensor], *, step: int = 7) -> Path:
    items = [Replicated(name=name, tensor=tensor) for name, tensor in tensors.items()]
    return save(State(items=items, document={"epoch": 3}), directory=directory, step=step, comm=SERIAL).path


def contents(path: Path) -> dict[str, torch.Tensor]:
    return load(path, comm=SERIAL)[1]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files, made by three ranks."""

    def rank_main(world: World) -> Path:
        return save(state_of(world.rank, 3), directory=tmp_path / "run", step=50, comm=world, files=2).path

    return run_threads(3, rank_main, timeout_s=300)[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_safetensors_file_has_every_bit_and_makes_the_same_checkpoint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(
        "hpctrain.checkpoint.operations.export.REGION_BYTES", 1 << 16
    )  # several regions per tensor
    target = tmp_path / "all.safetensors"
    run_threads(num_ranks, lambda world: export_safetensors(folder, target, comm=world), timeout_s=300)
    assert_same(safetensors.torch.load_file(target), whole_tensors())
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["step"] == "50"
    made = run_threads(
        num_ranks, lambda world: import_tensors(target, tmp_path / "back", comm=world), timeout_s=300
    )[0]
    assert made.path == tmp_path / "back" / "step-00000050.h5"
    assert compare(folder, made.path, comm=SERIAL).is_empty  # the document, too
    assert not list(tmp_path.glob(".*partial*"))


def test_every_dtype_of_the_format_comes_back(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(64, dtype=torch.uint8).reshape(2, -1).clone().view(getattr(torch, name))
        for name in SAFETENSORS_DTYPES
    }
    tensors["scalar"], tensors["none"] = torch.tensor(3.5), torch.empty(0, 4)
    tensors['odd "names"/\u00fc \U0001f600'] = torch.ones(3)
    target = tmp_path / "x.safetensors"
    export_safetensors(saved(tmp_path, tensors), target, comm=SERIAL)
    # torch's loader of the format knows fewer types than its writer: the header and the bytes are what counts.
    length = int.from_bytes(target.read_bytes()[:8], "little")
    header = json.loads(target.read_bytes()[8 : 8 + length])
    del header["__metadata__"]
    data = target.read_bytes()[8 + length :]
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        assert header[name]["shape"] == list(tensor.shape)
        assert data[begin:end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    version = safetensors.__version__
    if tuple(map(int, version.split(".")[:2])) < (0, 8):
        with pytest.raises(
            CheckpointError, match=rf"to safetensors {version}: .*Newer releases know more types"
        ):
            import_tensors(target, tmp_path / "back", comm=SERIAL)
        pytest.skip(f"safetensors {version} knows fewer types")
    made = import_tensors(target, tmp_path / "back", comm=SERIAL)
    assert_same(contents(made.path), tensors)


def test_weights_go_out_under_their_own_names_and_come_back_where_a_run_looks(tmp_path: Path) -> None:
    weights = {"0.weight": torch.randn(5, 3), "0.bias": torch.randn(5)}
    path = saved(tmp_path, {**{f"model/{n}": t for n, t in weights.items()}, "optimizer/x": torch.ones(2)})
    target = tmp_path / "w.safetensors"
    done = export_safetensors(tmp_path, target, comm=SERIAL, prefix="model/")
    assert (done.num_tensors, done.step, done.num_bytes) == (2, 7, target.stat().st_size)
    assert_same(safetensors.torch.load_file(target), weights)
    made = import_tensors(target, tmp_path / "back", comm=SERIAL, step=0)
    assert compare(path, made.path, comm=SERIAL, prefix="model/").is_empty
    assert list(contents(made.path)) == ["model/0.bias", "model/0.weight"]
    bare = import_tensors(target, tmp_path / "back", comm=SERIAL, step=1, prefix="")
    assert list(contents(bare.path)) == ["0.bias", "0.weight"]
    assert bare.path.with_name("step-00000000.h5").exists()  # importing deletes no other
    with pytest.raises(UsageError, match="give --step"):
        import_tensors(target, tmp_path / "back", comm=SERIAL)


def test_a_state_dict_goes_out_and_comes_back_with_weights_only(tmp_path: Path, folder: Path) -> None:
    target = tmp_path / "all.pt"
    export_state_dict(folder, target, comm=SERIAL)
    assert_same(torch.load(target, weights_only=True), whole_tensors())
    made = import_tensors(target, tmp_path / "back", comm=SERIAL, step=1, prefix="", files=3)
    assert [path.name for path in sorted(made.path.iterdir())] == [f"data-0000{i}.h5" for i in range(3)]
    assert_same(contents(made.path), whole_tensors())


def test_a_model_takes_what_was_imported(tmp_path: Path) -> None:
    made, other = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    safetensors.torch.save_file(made.state_dict(), tmp_path / "x.safetensors")
    path = import_tensors(tmp_path / "x.safetensors", tmp_path, comm=SERIAL, step=0).path
    assert load_weights(other, path, comm=SERIAL).fits
    assert_same(other.state_dict(), made.state_dict())


def test_state_dicts_as_others_write_them_are_taken(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "new.ckpt")
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    tied = torch.ones(4, 4)
    torch.save({"a": torch.nn.Parameter(tied), "b": tied.t()}, tmp_path / "tied.pth")
    expected = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, key in (("new.ckpt", "model"), ("old.bin", None)):
        made = import_tensors(tmp_path / name, tmp_path / name[:3], comm=SERIAL, step=0, key=key)
        assert_same(contents(made.path), expected)
    made = import_tensors(tmp_path / "tied.pth", tmp_path / "tied", comm=SERIAL, step=0)
    assert_same(contents(made.path), {"model/a": tied, "model/b": tied})


def test_several_safetensors_files_with_an_index_make_one_checkpoint(tmp_path: Path) -> None:
    parts = {
        "one.safetensors": {"a": torch.ones(2)},
        "two.safetensors": {"b": torch.zeros(3), "unused": torch.ones(1)},
    }
    for name, tensors in parts.items():
        safetensors.torch.save_file(tensors, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    made = import_tensors(index, tmp_path / "back", comm=SERIAL, step=0)
    assert_same(contents(made.path), {"model/a": torch.ones(2), "model/b": torch.zeros(3)})
    index.write_text(json.dumps({"weight_map": {"c": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match="should hold 'c', but it does not"):
        import_tensors(index, tmp_path / "back", comm=SERIAL, step=1)
    for name in ("../one.safetensors", "/etc/passwd", ".."):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="not a plain file name"):
            import_tensors(index, tmp_path / "back", comm=SERIAL, step=1)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_code_in_a_state_dict_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": Touch(ran)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Touch(ran)))
    for name, message in (("zip.pt", r"'b' \(\w+.mkdir\)"), ("plain.pt", "weights_only")):
        with pytest.raises(CheckpointError, match=message):
            import_tensors(tmp_path / name, tmp_path / "back", comm=SERIAL, step=0)
    assert not ran.exists()
    assert not (tmp_path / "back").exists()


def test_the_weights_of_a_lightning_checkpoint_are_imported_and_nothing_in_it_is_run(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"net": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))})
    model["net"][0].weight = torch.nn.Parameter(torch.randn(2, 3).t())  # not in row-major order
    model["net"].register_buffer("empty", torch.empty(0, 4, dtype=torch.bfloat16))
    model["head"] = torch.nn.Linear(3, 1, bias=False)
    state = {
        **model.state_dict(),
        "head.weight": model["head"].weight,
    }  # a parameter, as some programs save it
    content = {
        "pytorch-lightning_version": "2.6.6", "epoch": 1, "state_dict": model.state_dict(),
        "hyper_parameters": {"path": tmp_path, "run": Touch(tmp_path / "ran")}, "callbacks": {Touch: [1.5]},
        "optimizer_states": [torch.optim.Adam(model.parameters()).state_dict()], "parameters": state,
    }  # fmt: skip
    torch.save(content, tmp_path / "lightning.ckpt")

    def imported(**options: Any) -> dict[str, torch.Tensor]:
        path = import_tensors(
            tmp_path / "lightning.ckpt", tmp_path / "to", comm=SERIAL, step=0, replace=True, **options
        ).path
        return load(path, comm=SERIAL)[1]

    expected = model.state_dict()
    for options in ({}, {"key": "parameters"}):
        found = imported(**options)
        assert found.keys() == {f"model/{name}" for name in expected}
        assert all(same_bits(found[f"model/{name}"], tensor) for name, tensor in expected.items())
    assert imported(strip="net.0.", prefix="").keys() == {"weight", "bias"}
    for options, message in (
        ({"strip": "body."}, r"no tensor below 'body.' \(--strip\); it has 'net.empty'"),
        (
            {"key": "hyper_parameters"},
            r"not a plain state dict: it holds 'path' \(pathlib[.\w]+\), 'run' \(\w+.mkdir\)",
        ),
        ({"key": "epoch"}, "is a int, not a state dict"),
        ({"key": "weights"}, "no entry 'weights'; it holds 'pytorch-lightning_version'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            imported(**options)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.safetensors", b"", "not a valid safetensors file"),
        ("x.safetensors", b"\xff" * 40, "not a valid safetensors file"),
        ("x.safetensors", (2**40).to_bytes(8, "little") + b"{}", "not a valid safetensors file"),
        ("x.safetensors.index.json", b"[]", "not an index of safetensors files"),
        ("x.safetensors.index.json", b"{", "not an index of safetensors files"),
        ("x.pt", b"PK\x03\x04rubbish", "damaged, or not written by torch.save"),
        ("x.pt", b"", "cannot be read as a state dict"),
    ],
)
def test_damaged_foreign_files_are_refused(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        import_tensors(tmp_path / name, tmp_path / "back", comm=SERIAL, step=0)


def test_tensors_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="only dense tensors"):
        import_tensors(tmp_path / "x.pt", tmp_path / "back", comm=SERIAL, step=0)
    assert seen(tmp_path) == ["x.pt"]


def test_what_would_be_lost_or_never_end_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are called a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensors, expected in (
        ({1: torch.ones(2), "1": torch.zeros(2)}, "equal as strings"),
        ({"a": torch.ones(1).expand(2**45)}, "more than 16 times as long"),
        ({"a": nested}, "nested.tensor"),  # torch 2.15 refuses to load it: _rebuild_nested_tensor
    ):
        torch.save(tensors, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=expected):
            import_tensors(tmp_path / "x.pt", tmp_path / "back", comm=SERIAL, step=0)
    assert seen(tmp_path) == ["x.pt"]


def test_files_that_hold_something_else_are_explained(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "epoch": 3}, tmp_path / "x.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match=r"it holds 'model' \(dict\), 'epoch' \(int\)\. Name the entry"):
        import_tensors(tmp_path / "x.pt", tmp_path, comm=SERIAL, step=0)
    with pytest.raises(CheckpointError, match="has no entry 'modul'; it holds 'model'"):
        import_tensors(tmp_path / "x.pt", tmp_path, comm=SERIAL, step=0, key="modul")
    with pytest.raises(CheckpointError, match="is a Tensor, not a state dict"):
        import_tensors(tmp_path / "tensor.pt", tmp_path, comm=SERIAL, step=0)
    with pytest.raises(CheckpointError, match=r"x\.onnx is not a file"):
        import_tensors(tmp_path / "x.onnx", tmp_path, comm=SERIAL, step=0)
    (tmp_path / "x.onnx").write_bytes(b"")
    with pytest.raises(UsageError, match="is expected"):
        import_tensors(tmp_path / "x.onnx", tmp_path, comm=SERIAL, step=0)


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    path = saved(tmp_path, {"old": torch.ones(1)}, step=0)
    with pytest.raises(CheckpointError, match=r"step-00000000\.h5 exists"):
        import_tensors(tmp_path / "x.pt", tmp_path, comm=SERIAL, step=0)
    assert list(contents(path)) == ["old"]
    made = import_tensors(tmp_path / "x.pt", tmp_path, comm=SERIAL, step=0, replace=True, files=2)
    assert made.path.is_dir()
    assert list(contents(made.path)) == ["model/a"]
    assert not path.exists()


def test_what_safetensors_cannot_say_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    path = saved(tmp_path / "one", {"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"no complex128 \(tensor 'a'\)"):
        export_safetensors(path, target, comm=SERIAL)
    for name in ("__metadata__", "\ud800"):
        path = saved(tmp_path / "two", {name: torch.ones(1)})
        with pytest.raises(CheckpointError, match="does not allow the tensor name"):
            export_safetensors(path, target, comm=SERIAL)
    with pytest.raises(CheckpointError, match="no tensor under 'model/'"):
        export_safetensors(path, target, comm=SERIAL, prefix="model/")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_safetensors(tmp_path / "one", tmp_path / "none" / "x.safetensors", comm=SERIAL, prefix="b")
    assert sorted(seen(tmp_path)) == ["one", "two"]


def test_a_type_that_torch_cannot_write_is_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    path = saved(tmp_path / "one", {"a": torch.ones(2, dtype=torch.uint8).view(torch.uint4)})  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"torch\.save does not support this dtype: .*uint4"):
        export_state_dict(path, tmp_path / "x.pt", comm=SERIAL)
    assert seen(tmp_path) == ["one"]


def test_where_there_is_no_room_nothing_is_left(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", {"a": torch.ones(1000, 1000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        for name, export in (("x.safetensors", export_safetensors), ("x.pt", export_state_dict)):
            with pytest.raises(CheckpointError, match=r"cannot write .*x\."):
                export(path, tmp_path / name, comm=SERIAL)
        with pytest.raises(CheckpointError, match="a limit on file sizes"):
            copy_checkpoint(path, tmp_path / "copy", comm=SERIAL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(seen(tmp_path)) == ["copy", "run"]
    assert not os.listdir(tmp_path / "copy")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, folder: Path, num_ranks: int) -> None:
    piece = read_structure(folder).metadata.tensors["large"].pieces[0]
    with open(folder / f"data-{piece.file:05}.h5", "r+b") as file:
        file.seek(piece.file_offset + 100)
        file.write(b"\xff\xff")
    for name, export in (("x.safetensors", export_safetensors), ("x.pt", export_state_dict)):
        with pytest.raises(CheckpointError, match="damaged: tensor 'large'"):
            run_threads(num_ranks, lambda w, e=export, n=name: e(folder, tmp_path / n, comm=w), timeout_s=300)  # type: ignore[misc]
    assert seen(tmp_path) == ["run"]
