"""What of the fork server needs no processes: which programs it takes, what it imports, which clients it refuses."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from hpctrain.launch.fork_server import plan
from hpctrain.launch.fork_server.likeness import Likeness, is_per_rank
from hpctrain.launch.fork_server.plan import KEY_VARIABLE, ForkServer, divide_servers, plan_fork_server
from hpctrain.launch.fork_server.preload import Imported, modules_for
from hpctrain.launch.fork_server.program import Program, read_program


def program(*words: str) -> Program:
    found = read_program([sys.executable, *words])
    assert isinstance(found, Program), found
    return found


def test_programs_of_this_python_are_known(tmp_path: Path) -> None:
    found = program("-u", "-O", "train.py", "-x", "--", "y")
    assert (found.options, found.script, found.module) == (("-u", "-O"), "train.py", None)
    assert found.arguments == ("-x", "--", "y")
    found = program("-m", "package.module", "-m", "z")
    assert (found.script, found.module, found.arguments) == (None, "package.module", ("-m", "z"))
    command = tmp_path / "command"
    command.write_text(f"#!{sys.executable}\nprint()\n")
    command.chmod(0o755)
    script = read_program([str(command), "a"])
    assert isinstance(script, Program)
    assert (script.script, script.arguments, script.title) == (str(command), ("a",), "command")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no-such-program"], "is not a program"),
        (["sh", "-c", "true"], "is not a Python program"),
        ([sys.executable], "no program to run"),
        ([sys.executable, "-c", "pass"], "option -c is not one that hpctrain knows"),
        ([sys.executable, "-W", "error", "x.py"], "option -W is not one that hpctrain knows"),
        ([sys.executable, "-"], "option - is not one that hpctrain knows"),
    ],
)
def test_other_commands_are_not_taken(words: list[str], why: str) -> None:
    found = read_program(words)
    assert isinstance(found, str)
    assert why in found


def test_another_python_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(os.path.realpath(sys.executable))
    found = read_program([str(tmp_path / "python3"), "x.py"])
    assert isinstance(found, str)
    assert "a different Python" in found


def test_what_a_program_imports_is_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch.nn as nn\nfrom numpy import array\nimport requests\nraise SystemExit('was run')\n"
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "package/part.py").write_text("def main():\n    import numpy\n")
    (tmp_path / "broken.py").write_text("import torch\ndef\n")
    monkeypatch.syspath_prepend(tmp_path)
    directory = str(tmp_path)
    found = modules_for(program("train.py"), directory=directory, preload=["mine"])
    assert {"torch", "numpy", "mine"} <= set(found)
    assert "requests" not in found
    assert modules_for(program("-m", "package.part"), directory=directory, preload=()) == ["numpy"]
    (tmp_path / "hpctrain").write_text(f"#!{sys.executable}\n")
    of_command = modules_for(program("hpctrain"), directory=directory, preload=())
    assert "hpctrain.run.training" in of_command
    assert modules_for(program("-m", "hpctrain"), directory=directory, preload=()) == of_command
    for words in (["broken.py"], ["absent.py"], ["-m", "absent.part"]):
        assert modules_for(program(*words), directory=directory, preload=()) == []


def test_variables_of_launchers_may_differ_and_those_of_libraries_may_not() -> None:
    for name in (
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_FD",
        "SLURM_PROCID",
        "CUDA_VISIBLE_DEVICES",
        "PWD",
        "TMPDIR",
    ):
        assert is_per_rank(name), name
    for name in (
        "OMP_NUM_THREADS",
        "LD_PRELOAD",
        "PYTHONPATH",
        "MKL_NUM_THREADS",
        "MALLOC_ARENA_MAX",
        "MY_RANK",
    ):
        assert not is_per_rank(name), name


def test_a_client_that_was_started_otherwise_is_refused() -> None:
    own = Likeness.of(os.getpid())
    assert own.why_unlike(own) is None
    environ = {**own.environ, "OMP_NUM_THREADS": "17"}
    for other, why in (
        (dataclasses.replace(own, environ=environ), "OMP_NUM_THREADS"),
        (dataclasses.replace(own, status={**own.status, "CapEff": "0"}), "CapEff"),
        (dataclasses.replace(own, namespaces={**own.namespaces, "mnt": "mnt:[1]"}), "namespaces"),
        (dataclasses.replace(own, root="/elsewhere"), "namespaces"),
        (dataclasses.replace(own, cgroups="0::/elsewhere\n"), "control groups"),
        (dataclasses.replace(own, policy="bind:7"), "memory policy"),
        (dataclasses.replace(own, nice=own.nice - 1), "priority"),
        (dataclasses.replace(own, scheduling=(os.SCHED_BATCH, 0)), "policies"),
    ):
        found = own.why_unlike(other)
        assert found is not None
        assert why in found
    low = dataclasses.replace(own, hard_limits=(5,) * len(own.hard_limits))
    high = dataclasses.replace(own, hard_limits=(6,) * len(own.hard_limits))
    endless = dataclasses.replace(own, hard_limits=(-1,) * len(own.hard_limits))
    assert high.why_unlike(low) is None
    assert endless.why_unlike(high) is None
    for less, more in ((low, high), (high, endless)):
        assert "more of a resource" in (less.why_unlike(more) or "")


@pytest.mark.skipif(plan.find_client() is None, reason="the program that stands for a rank was not compiled")
def test_by_default_ranks_are_forked_where_it_saves_something_and_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_GPU_DEVICES", ())
    python = [sys.executable, "train.py"]

    def asked(
        command: list[str], *, ranks: int = 3, by_default: bool = True, lingers_s: float = 0.0, **environ: str
    ) -> str | None:
        updates: dict[str, str] = {}
        words, note = plan_fork_server(
            ForkServer(by_default=by_default, lingers_s=lingers_s),
            command,
            environ=environ,
            ranks_on_a_node=ranks,
            updates=updates,
        )
        assert bool(words) == (KEY_VARIABLE in updates) == ("are forked" in (note or ""))
        return note

    assert "are forked" in (asked(python) or "")
    assert asked(python, ranks=2) is None
    assert "are forked" in (asked(python, ranks=1, lingers_s=9.0) or "")
    assert asked(["true"]) is None
    assert "HPCTRAIN_FORK_SERVER=off" in (asked(python, HPCTRAIN_FORK_SERVER="off") or "")
    monkeypatch.setattr(plan, "_GPU_DEVICES", (str(tmp_path),))
    assert "never been tested with GPUs" in (asked(python) or "")
    assert "are forked" in (asked(python, ranks=1, by_default=False) or "")
    assert "is not a Python program" in (asked(["true"], by_default=False) or "")


def test_launches_that_differ_in_what_ranks_share_have_servers_of_their_own() -> None:
    def key(*words: str, **environ: str) -> str:
        updates = {KEY_VARIABLE: "k"}
        divide_servers(["client", *words], environ=environ, updates=updates)
        return updates[KEY_VARIABLE]

    keys = [key(), key("-O"), key(LD_PRELOAD="x.so"), key(OMP_NUM_THREADS="2")]
    assert len({*keys}) == len(keys)
    assert key(OMPI_COMM_WORLD_SIZE="2", SLURM_STEP_ID="3") == keys[0]


def test_a_program_that_would_import_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other, third = (tmp_path / name for name in ("mine", "other", "third"))
    for folder in (mine, other, third):
        folder.mkdir()
    (mine / "only_mine.py").touch()
    (other / "json").mkdir()  # without __init__.py Python takes its own
    (third / "json.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path])
    imported = Imported(str(mine), frozenset(sys.modules) - {"json"})
    assert imported.why_other(str(mine)) is None
    assert imported.why_other(str(other)) is None
    assert imported.why_other(None) is None
    assert "json is another module" in (imported.why_other(str(third)) or "")
    __import__("only_mine")
    sys.path.remove(str(mine))
    try:
        imported = Imported(str(mine), frozenset(sys.modules) - {"only_mine"})
        assert imported.why_other(str(mine)) is None
        assert "only_mine is another module" in (imported.why_other(str(other)) or "")
    finally:
        del sys.modules["only_mine"]
    imported.move_to(str(other))
    assert (sys.path[0], sys.path.count(str(other))) == (str(other), 1)
