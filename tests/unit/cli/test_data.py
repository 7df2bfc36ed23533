from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import DataError, UsageError

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from click.testing import Result
    from typer.testing import CliRunner

    from hpctrain.cli.data import data_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(data_app, [str(a) for a in arguments])


def succeed(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exception is None, result.output
    return result.stdout


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    succeed("pack", "digits", tmp_path / "digits")
    return tmp_path / "digits"


def test_pack_then_info_then_verify(packed: Path) -> None:
    text = succeed("info", packed)
    assert f"{packed}/train: 1,438 samples in 1 shard" in text
    assert "field image: uint8 (1, 8, 8)" in text
    assert "num_classes: 10" in text
    assert succeed("verify", packed) == f"{packed}/test: undamaged\n{packed}/train: undamaged\n"


def test_info_as_json(packed: Path) -> None:
    (train,) = json.loads(succeed("info", packed / "train", "--json"))
    assert train["samples"] == 1438
    assert {"dtype": "uint8", "shape": [1, 8, 8], "kind": "array"}.items() <= train["fields"]["image"].items()
    assert train["shards"][0]["samples"] == 1438


def test_pack_options_reach_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text("abcdefghij" * 100)
    out = tmp_path / "out"
    succeed(
        "pack", f"text:{tmp_path / 'texts'}", out, "--window", "16", "--stride", "8", "--shard-mb", "0.002",
        "--held-out", "0",
    )  # fmt: skip
    (info,) = json.loads(succeed("info", out, "--json"))
    assert (info["tokens"]["window"], info["tokens"]["stride"]) == (16, 8)
    assert info["kind"] == "tokens"
    assert len(info["shards"]) > 3
    assert max(shard["file_bytes"] for shard in info["shards"]) < 2000 + 3 * 4096


def test_verify_names_the_damage_and_fails_with_a_data_error(packed: Path) -> None:
    path = packed / "train" / "shard-00000.h5"
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 16]))
    result = run("verify", packed)
    assert isinstance(result.exception, DataError)
    assert "is damaged in 1 place: restore the shards" in str(result.exception)
    assert f"{packed}/test: undamaged" in result.stdout
    assert "shard-00000.h5, field 'label', samples 0 to 1437: the content differs" in result.stdout
    result = run("verify", packed, "--json")
    report = json.loads(result.stdout)
    assert report["damaged"] is True
    assert report["datasets"][f"{packed}/train"][0]["field"] == "label"


def test_packing_again_needs_overwrite(packed: Path) -> None:
    result = run("pack", "digits", packed)
    assert isinstance(result.exception, UsageError)
    assert "already holds a dataset: choose another directory, or --overwrite" in str(result.exception)
    succeed("pack", "digits", packed, "--overwrite", "--held-out", "0.5")
    assert "899 samples" in succeed("info", packed / "train")


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = run("pack", "digits", tmp_path, "--overwrite")
    assert isinstance(result.exception, UsageError)
    assert "is not empty (notes.txt)" in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["info", "nowhere"], DataError, "no dataset at nowhere"),
        (["verify", "nowhere"], DataError, "no dataset at nowhere"),
        (["pack", "nothing", "out"], UsageError, "unknown source 'nothing'"),
        (["pack", "x.npz", "out"], DataError, "does not exist"),
        (["pack", "digits", "out", "--shard-mb", "0"], UsageError, "--shard-mb 0.0"),
        (["pack", "digits", "out", "--stride", "4"], UsageError, "the source digits holds arrays"),
    ],
)
def test_bad_calls_end_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, kind)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_npz_files_are_packed(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((20, 3), np.float32), y=np.arange(20))
    out = succeed("pack", tmp_path / "x.npz", tmp_path / "out")
    assert out == f"{tmp_path}/out: 20 samples in 1 shard, 0.0 MB\n"
