"""Checkpoints to and from torch.distributed.checkpoint in one process and several threads: the same bits both ways."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hpctrain.checkpoint import Replicated, State, export_dcp, import_dcp, load, load_weights, save
from hpctrain.checkpoint.dcp import convert as export_module
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

SERIAL = SerialWorld()
# Without a process group DCP warns that it saves in one process; torch warns about its own use of old interfaces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[3].parameters()], "lr": 0.01},
        ]
    )
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
        optimizer.step()
    return model, optimizer


def state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every dtype, empty ones, scalars, and ones that do not lie in row-major order."""
    torch.manual_seed(1)
    random = torch.randint(0, 2, (24, 16), dtype=torch.uint8)
    tensors = {
        str(dtype)[6:]: random.view(dtype) if dtype.itemsize > 1 else random.to(dtype) for dtype in DTYPES
    }
    return {
        **tensors,
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "transposed": torch.randn(5, 7).t(),
        "part": torch.randn(9, 9)[2:5, 1::3],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def test_a_model_and_its_optimizer_come_from_dcp_and_go_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save({**state_dict(model, optimizer), "epoch": 4, "odd": {1, 2}}, checkpoint_id=tmp_path / "dcp")
    done = import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=SERIAL, step=3)
    assert list(done.left_out) == ["odd"]
    checkpoint, tensors = load(done.saved.path, comm=SERIAL)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        expected |= {f"optimizer/{names[id(parameter)]}::{key}": value for key, value in state.items()}
    assert_same(tensors, expected)
    groups = checkpoint.document["optimizer"]["groups"]
    assert [group["options"]["lr"] for group in groups] == [0.001, 0.01]
    assert groups[0]["parameters"] == ["0.weight", "0.bias"]
    assert groups[0]["options"]["betas"] == [0.9, 0.999]
    assert checkpoint.document["objects"] == [{"path": ["epoch"], "value": 4}]
    fresh = trained(seed=5)[0]
    load_weights(fresh, done.saved.path, comm=SERIAL)
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))

    exported = export_dcp(done.saved.path, tmp_path / "back", comm=SERIAL)
    assert exported.num_tensors == len(tensors)
    other_model, other_optimizer = trained(seed=9)
    target = {**state_dict(other_model, other_optimizer), "epoch": 0}
    dcp.load(target, checkpoint_id=tmp_path / "back")
    set_state_dict(
        other_model, other_optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"]
    )
    assert target["epoch"] == 4
    assert_same(dict(other_model.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert_same(theirs, mine)
    assert [g["lr"] for g in other_optimizer.param_groups] == [0.001, 0.01]

    again = import_dcp(tmp_path / "back", tmp_path / "again", comm=SERIAL)
    reread, found = load(again.saved.path, comm=SERIAL)
    assert (reread.step, reread.document) == (3, checkpoint.document)
    assert_same(found, tensors)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tensors_of_every_kind_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(export_module, "REGION_BYTES", 64)  # several chunks per tensor
    tensors = odd_tensors()
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp")

    def rank_main(world: Any) -> tuple[Path, Path]:
        first = import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=world, step=1).saved.path
        export_dcp(first, tmp_path / "back", comm=world)
        return first, import_dcp(
            tmp_path / "back", tmp_path / "again", comm=world, files=num_ranks
        ).saved.path

    for path in run_threads(num_ranks, rank_main, timeout_s=300)[0]:
        assert_same(load(path, comm=SERIAL)[1], {f"model/{name}": t for name, t in tensors.items()})
    target = {"model": {name: torch.zeros_like(t) for name, t in tensors.items()}}
    dcp.load(target, checkpoint_id=tmp_path / "back")
    assert_same(target["model"], tensors)
    dcp_to_torch_save(tmp_path / "back", tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True)["model"], tensors)


def test_a_checkpoint_of_any_names_comes_back_from_dcp(tmp_path: Path) -> None:
    def rank_main(world: Any) -> Path:
        return save(state_of(world.rank, 3), directory=tmp_path / "run", step=50, comm=world, files=2).path

    source = run_threads(3, rank_main, timeout_s=300)[0]
    run_threads(2, lambda world: export_dcp(source, tmp_path / "dcp", comm=world), timeout_s=300)
    done = import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=SERIAL)
    first, second = load(source, comm=SERIAL)[0], load(done.saved.path, comm=SERIAL)[0]
    assert (first.step, first.document) == (second.step, second.document)
    assert_same(load(done.saved.path, comm=SERIAL)[1], whole_tensors())


def test_state_dicts_of_other_shapes(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights = dict(model.state_dict())
    dcp.save(weights, checkpoint_id=tmp_path / "bare")
    bare = import_dcp(tmp_path / "bare", tmp_path / "ours", comm=SERIAL, step=1)
    assert_same(load(bare.saved.path, comm=SERIAL)[1], {f"model/{name}": t for name, t in weights.items()})
    export_dcp(bare.saved.path, tmp_path / "bare again", comm=SERIAL, weights=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(target, checkpoint_id=tmp_path / "bare again")
    assert_same(target, weights)

    dcp.save({"app": state_dict(model, optimizer), "more": torch.ones(3)}, checkpoint_id=tmp_path / "app")
    part = import_dcp(tmp_path / "app", tmp_path / "ours", comm=SERIAL, step=2, under="app")
    assert "optimizer/0.weight::exp_avg" in load(part.saved.path, comm=SERIAL)[1]
    whole = import_dcp(tmp_path / "app", tmp_path / "ours", comm=SERIAL, step=3)
    assert {"more", "app/model.0.weight"} <= load(whole.saved.path, comm=SERIAL)[1].keys()
    export_dcp(part.saved.path, tmp_path / "app again", comm=SERIAL, under="app")
    other_model, other_optimizer = trained(seed=2)
    nested = {"app": state_dict(other_model, other_optimizer)}
    dcp.load(nested, checkpoint_id=tmp_path / "app again")
    assert_same(nested["app"]["model"], weights)
    with pytest.raises(CheckpointError, match="no tensor below 'nothing'; at its top are 'app', 'more'"):
        import_dcp(tmp_path / "app", tmp_path / "ours", comm=SERIAL, step=4, under="nothing")


def test_files_without_crc_are_imported_unchecked(tmp_path: Path) -> None:
    tensors = odd_tensors()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(CheckpointError, match=r"import it with --no-verify"):
        import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=SERIAL, step=1)
    done = import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=SERIAL, step=1, verify=False)
    assert_same(
        load(done.saved.path, comm=SERIAL)[1],
        {f"model/{name}": tensor for name, tensor in tensors.items()},
    )


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    items = [Replicated(name=name, tensor=torch.ones(2)) for name in ("a/b", "a.b")]
    path = save(State(items=items), directory=tmp_path / "run", step=1, comm=SERIAL).path
    with pytest.raises(CheckpointError, match=r"2 of its entries have the key 'a\.b'"):
        export_dcp(path, tmp_path / "dcp", comm=SERIAL)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "there")
    with pytest.raises(UsageError, match="exists: choose another name"):
        export_dcp(path, tmp_path / "there", comm=SERIAL)
    with pytest.raises(UsageError, match="does not record a step: give --step"):
        import_dcp(tmp_path / "there", tmp_path / "run", comm=SERIAL)
    with pytest.raises(CheckpointError, match="exists: choose another step"):
        import_dcp(tmp_path / "there", tmp_path / "run", comm=SERIAL, step=1)
    with pytest.raises(UsageError, match="is not a checkpoint of torch"):
        import_dcp(tmp_path / "run", tmp_path / "run", comm=SERIAL, step=2)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["run", "there"]
    assert json.dumps([path.name for path in (tmp_path / "run").iterdir()]) == '["step-00000001.h5"]'


class StrictZip(zipfile.ZipFile):
    """Accepts only a file that is one archive: its first record at byte 0, and its zip64 end record, if it has one,
    exactly where the locator says. So zipfile checks it since the fix of CVE-2025-8291."""

    opened = 0

    def __init__(self, file: Any) -> None:
        content = file.read()
        assert content.startswith(b"PK\x03\x04")
        assert content[-22:-18] == b"PK\x05\x06"
        if content[-42:-38] == b"PK\x06\x07":
            record = int.from_bytes(content[-34:-26], "little")
            assert content[record : record + 4] == b"PK\x06\x06"
            assert record + 56 == len(content) - 42
        StrictZip.opened += 1
        super().__init__(file)
        assert min(entry.header_offset for entry in self.infolist()) == 0


def test_zipfile_is_given_each_of_several_archives_of_a_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = odd_tensors()
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 1
    monkeypatch.setattr(zipfile, "ZipFile", StrictZip)
    StrictZip.opened = 0
    import_dcp(tmp_path / "dcp", tmp_path / "ours", comm=SERIAL, step=1)
    assert StrictZip.opened > 20
    monkeypatch.undo()
    _, found = load(tmp_path / "ours/step-00000001.h5", comm=SERIAL)
    assert_same({name.removeprefix("model/"): tensor for name, tensor in found.items()}, tensors)
