"""`make picture`: runs commands and draws them with their output as a terminal picture, docs/pictures/demo.svg.

    python scripts/picture.py docs/pictures/demo.svg

The commands run in a temporary folder, with this checkout. Only the paths of the checkout and of the Python environment
are edited: they are shown as `.` and `.venv`. The file contains the text twice: drawn, in lines of WIDTH characters,
and as it was printed, in <desc>. tests/ranks/train/test_picture.py compares it with what the code prints.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from hpctrain.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
WIDTH = 112
COMMANDS = (
    "hpctrain data pack digits data/digits",
    "hpctrain launch -n 4 --ranks-per-node 2 -- hpctrain train examples/digits.toml",
    "hpctrain checkpoint list runs/digits/checkpoints",
)
# Variables that are removed: set by the user for this shell, or by the launcher of the tests.
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "HPCTRAIN_", "OMP_")
# Rich's own template loads a font from the network, which a picture in a README must not.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<desc>{{transcript}}</desc>
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def run(command: str, *, directory: Path) -> str:
    """Returns stdout and stderr of `command` as a terminal would show them. Raises CalledProcessError if it fails."""
    executables = Path(sys.executable).parent
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environ["PATH"] = f"{executables}{os.pathsep}{os.environ['PATH']}"
    environ["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(
        command.split(), cwd=directory, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=True, timeout=600,
    )  # fmt: skip
    text = done.stdout.replace(f"{executables}{os.sep}", f".venv{os.sep}bin{os.sep}")
    return text.replace(f"{REPOSITORY}{os.sep}", "").rstrip()


def outputs(commands: tuple[str, ...] = COMMANDS) -> list[str]:
    """Runs the commands one after another in a new folder and returns what each printed. Raises CalledProcessError if
    one fails."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-picture-") as name:
        (Path(name) / "examples").symlink_to(REPOSITORY / "examples")
        return [run(command, directory=Path(name)) for command in commands]


def draw(printed: list[str], *, title: str) -> str:
    """Returns the SVG text of COMMANDS with what each has printed."""
    transcript = []
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, highlight=False)
        for command, text in zip(COMMANDS, printed, strict=True):
            console.print(Text(f"$ {command}", style="bold"))
            console.print(Text(text))
            transcript += [f"$ {command}", text]
        svg = console.export_svg(title=title, theme=MONOKAI, code_format=SVG, unique_id="demo")
    # Trailing blanks of lines are drawn as separate text elements, which only make the file larger.
    svg = re.sub(r"<text [^>]*>(&#160;|\s)*</text>", "", svg)
    svg = "\n".join(line for line in svg.splitlines() if line.strip()) + "\n"
    return svg.replace("{transcript}", html.escape("\n".join(transcript), quote=False))


def machine() -> str:
    """Returns the picture's title: versions and cores of the machine that ran the commands."""
    mpirun = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    cores = len(os.sched_getaffinity(0))
    release = mpirun.splitlines()[0].removeprefix("mpirun ").replace("(", "").replace(")", "")
    return f"hpctrain {__version__}, {release}, torch {torch.__version__}, {cores} cores"


def main() -> None:
    target = Path(sys.argv[1])
    svg = draw(outputs(), title=machine())
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg, encoding="utf-8")
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
