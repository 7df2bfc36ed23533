"""The devices of these tests, and their outcomes for `python -m tests.gpu`.

Imports pytest, torch and hpctrain only: where the GPU is, no other package of the tests may be installed.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.check import Check

_CHECK = pytest.StashKey[Check]()
_BEGAN_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="the only device; auto: the first GPU, or the CPU if there is none")
    parser.addoption("--checks", help="names of checks to run, separated by commas")
    parser.addoption("--outcomes", type=Path, help="file to which outcomes are appended, a line of JSON each")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--device", None)
    if asked == "auto":
        asked = "cuda:0" if torch.cuda.is_available() else "cpu"
    # What starts ranks is long, and other tests start them on the CPU.
    long = any(mark.name == "launches" for mark in metafunc.definition.iter_markers())
    on_cpu = pytest.param("cpu", marks=[pytest.mark.thorough] if long else [])
    devices = [asked] if asked else [on_cpu, pytest.param("cuda:0", marks=pytest.mark.gpu)]
    metafunc.parametrize("check", devices, indirect=True)


@pytest.fixture
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Check:
    device = torch.device(request.param)
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    made = Check(device=device, scratch=tmp_path)
    request.node.stash[_CHECK] = made
    return made


def name_of(item: pytest.Item) -> str:
    """Returns the check's name: `streams` for `test_streams[cpu]`."""
    return item.name.partition("[")[0].removeprefix("test_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--outcomes", None) is None:
        return
    items[:] = [item for item in items if "check" in getattr(item, "fixturenames", ())]
    if asked := config.getoption("--checks"):
        items[:] = [item for item in items if name_of(item) in asked.split(",")]
    if items:
        _append(config, {"names": [name_of(item) for item in items], "about": _about(config)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if report.when == "setup":
        item.stash[_BEGAN_S] = time.perf_counter()
    outcomes = item.config.getoption("--outcomes", None)
    if outcomes is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
        found: dict[str, Any] = {
            "name": name_of(item),
            "status": report.outcome,
            "figures": {},
            "needs_gpu": [],
        }
        if report.passed:
            check = item.stash[_CHECK]
            found |= {"text": check.text, "needs_gpu": check.needs_gpu}
            found["figures"] = {name: float(f"{value:.4g}") for name, value in check.figures.items()}
        else:
            said = str(call.excinfo.value) if call.excinfo is not None else ""
            found["text"] = (said.splitlines() or ["failed"])[0]
        _append(item.config, found | {"seconds": round(time.perf_counter() - item.stash[_BEGAN_S], 2)})
        if report.failed:
            item.session.shouldstop = "after an error of CUDA a process cannot use the GPU"
    return report


def _append(config: pytest.Config, document: dict[str, Any]) -> None:
    with config.getoption("--outcomes").open("a") as file:
        file.write(json.dumps(document) + "\n")


def _about(config: pytest.Config) -> dict[str, Any]:
    """Returns the properties of the machine on which results may depend."""
    asked = config.getoption("--device", None)
    found: dict[str, Any] = {
        "device": "cuda" if asked not in ("cpu", None) and torch.cuda.is_available() else "cpu",
        "python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release(),
    }  # fmt: skip
    if found["device"] == "cuda":
        properties = torch.cuda.get_device_properties(torch.device("cuda:0" if asked == "auto" else asked))
        found |= {
            "gpu": properties.name,
            "gpu_memory_gb": round(properties.total_memory / 1e9),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found
