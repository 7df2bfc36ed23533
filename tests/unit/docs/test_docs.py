"""What the documentation says is there, and its Python runs."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


def hpctrain(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))}
    return subprocess.run(
        [sys.executable, "-m", "hpctrain.cli.main", *words],
        cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


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


@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md", "docs/first-steps.md"])
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
        asked = hpctrain(*(word for word in group if not word.startswith("-")), "--help")
        assert asked.returncode == 0, f"{name} shows hpctrain {' '.join(group)}:\n{asked.stderr}"
        for option in options:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", asked.stdout), f"{group} has no {option}"


def test_the_exit_code_table_is_that_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: code.value for code in ExitCode}


def test_the_help_has_every_exit_code() -> None:
    shown = " ".join(hpctrain("--help").stdout.split()).partition("Exit codes: ")[2].partition(". ")[0]
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
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"epoch \d  loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoints" / "step-00000048.h5").exists()


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
