"""What the documentation says is there, and its Python runs."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.order import quality_rows
from hpctrain.errors import CheckpointError, ExitCode, HpctrainError, from_exit_code

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
GROUPS = ("data", "checkpoint", "bench", "slurm")  # commands that have commands
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    headings = HEADING.findall(without_code(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page whose language matches the pattern `language`; "" is none."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for found, text in blocks if re.fullmatch(language, found)]


def commands(page: Path) -> list[list[str]]:
    """The words of each `hpctrain ...` that the page's code blocks show, also behind a launcher's `--`."""
    found = []
    for block in code_blocks(page, "(bash|sh|console)?"):
        for line in block.splitlines():
            words = shlex.split(line.split("  #")[0].removeprefix("$ "), comments=True)
            starts = [place for place, word in enumerate(words) if word == "hpctrain"]
            found += [words[place:] for place in starts]
    return found


def python(*words: str, cwd: Path) -> str:
    """What a Python prints that was started outside of any launch, from which it must end with 0."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@functools.cache
def help_of(*words: str) -> str:
    """The help of a command, or of a group of commands."""
    return python("-m", "hpctrain.cli.main", *words, "--help", cwd=REPOSITORY)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # another site's
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in anchors(linked), f"{page.name} links to {target}, which has no such heading"


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/getting-started.md", "docs/first-steps.md", "docs/guides/checkpoint-commands.md"],
)
def test_every_command_shown_exists(name: str) -> None:
    shown = commands(REPOSITORY / name)
    assert len(shown) >= 5
    by_help: dict[tuple[str, ...], set[str]] = {}
    for words in shown:
        group = words[1:3] if len(words) > 2 and words[1] in GROUPS else words[1:2]
        own = words[: words.index("--")] if "--" in words else words
        options = {word.split("=")[0] for word in own if re.match(r"--?[a-z]", word)}
        by_help.setdefault(tuple(group), set()).update(options)
    for group, options in by_help.items():
        shown_help = help_of(*(word for word in group if not word.startswith("-")))
        for option in options:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown_help), f"{group} has no {option}"


def test_the_guide_to_checkpoint_commands_shows_each_and_names_only_options_that_exist() -> None:
    page = REPOSITORY / "docs" / "guides" / "checkpoint-commands.md"
    shown = {words[2] for words in commands(page) if words[1] == "checkpoint"}
    listed = help_of("checkpoint").partition("Commands")[2]
    assert shown == set(re.findall(r"^\W*([a-z][a-z-]*)  ", listed, flags=re.MULTILINE))
    helps = "".join(help_of("checkpoint", command) for command in sorted(shown))
    for option in re.findall(r"`(--[a-z-]+)", page.read_text()):
        assert option in helps, option


def test_the_exit_code_table_is_that_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: code.value for code in ExitCode}


def test_the_help_has_every_exit_code() -> None:
    shown = " ".join(help_of().split()).partition("Exit codes: ")[2].partition(". ")[0]
    assert shown.split("; ") == [f"{code.value} {code.summary}" for code in ExitCode]


@pytest.mark.parametrize("code", [code for code in ExitCode if code is not ExitCode.DONE])
def test_an_exit_code_has_an_exception_class(code: ExitCode) -> None:
    assert from_exit_code(code).exit_code is code
    assert from_exit_code(code) is not HpctrainError


def test_the_class_of_a_code_is_the_first_one_that_has_it() -> None:
    assert from_exit_code(4) is CheckpointError
    assert from_exit_code(1) is HpctrainError


def test_the_python_of_the_own_loop_guide_runs(tmp_path: Path) -> None:
    blocks = code_blocks(REPOSITORY / "docs" / "guides" / "own-loop.md", "python")
    assert len(blocks) >= 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    printed = python("-W", "error", str(script), cwd=tmp_path)
    losses = [float(found) for found in re.findall(r"epoch \d  loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoints" / "step-00000048.h5").exists()


@pytest.mark.parametrize(
    ("guide", "num_blocks", "is_right"),
    [
        ("checkpoint-commands", 1, lambda names: names["copied"].path.is_dir()),
        ("data", 4, lambda names: names["place"] == 64),
        ("data-order", 1, lambda names: names["first"].epoch == 2),
        ("adasum", 1, lambda names: names["updater"].state()["order"] is None),
        ("parameter-server", 2, lambda names: names["position"].step == 20),
    ],
)
def test_the_python_of_the_guide_runs(
    guide: str,
    num_blocks: int,
    is_right: Callable[[dict[str, Any]], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "guides" / f"{guide}.md"
    blocks = code_blocks(page, "python")
    assert len(blocks) >= num_blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert is_right(names)


def test_the_table_of_the_guide_to_orders_is_what_the_orders_do() -> None:
    guide = (REPOSITORY / "docs" / "guides" / "data-order.md").read_text()
    assert "\n".join(quality_rows()) in guide


def test_five_lines_of_a_horovod_script_change() -> None:
    """What the guide and the example say of themselves."""
    before, after = (
        (REPOSITORY / "examples" / name).read_text().split('"""')[2].splitlines()
        for name in ("own_loop_horovod.py", "own_loop.py")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    gone = [line[2:] for line in changed if line[0] == "-"]
    new = [line[2:] for line in changed if line[0] == "+"]
    assert len(gone) <= 5
    assert len(new) <= 5
    guide = (REPOSITORY / "docs" / "guides" / "own-loop.md").read_text()
    for sign, lines in (("-", gone), ("+", new)):
        for line in lines:
            assert f"\n{sign}{line}\n" in guide, f"the guide's difference lacks {sign}{line}"


def test_the_layers_shown_are_those_that_are_checked() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    checked = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    shown = code_blocks(REPOSITORY / "docs" / "architecture.md", "")[0].splitlines()
    assert len(shown) == len(checked)
    for line, layer in zip(shown, checked, strict=True):
        assert line.split("   ")[0].strip() == layer or line.startswith(f"{layer} "), (
            f"{line!r} is not {layer!r}"
        )
    drawn = code_blocks(REPOSITORY / "docs" / "architecture.md", "mermaid")[0]
    packages = {name for layer in checked for name in layer.split(" | ")}
    drawn_words = set(re.findall(r"\w+", drawn))
    assert {name for name in packages if (REPOSITORY / "hpctrain" / name).is_dir()} <= drawn_words


def test_the_files_that_the_architecture_names_are_there() -> None:
    """A name without its folders is that of a file in any folder."""
    named = re.findall(
        r"`([\w./-]+\.(?:py|c|md|toml|sh))`", (REPOSITORY / "docs" / "architecture.md").read_text()
    )
    folders = ("hpctrain", "scripts", "benchmarks", "tests")
    files = {
        path.as_posix() for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix
    }
    # The first is in none of these folders, the second in a run directory.
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert missing <= {"pyproject.toml", "recipe.toml"}


@pytest.mark.parametrize("name", ["build", "runtime", "test"])
def test_every_requirement_has_its_reason(name: str) -> None:
    pinned = re.findall(
        r"^([A-Za-z0-9_-]+)==", (REPOSITORY / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE
    )
    assert pinned
    cells = re.findall(
        r"^\| ([^|]+) \|", (REPOSITORY / "docs" / "dependencies.md").read_text(), flags=re.MULTILINE
    )
    explained = {word.strip() for cell in cells for word in cell.lower().split(",")}
    assert not set(pinned) - explained
