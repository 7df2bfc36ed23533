"""Writes docs/pictures/demo.svg: a terminal picture of commands that are run now, with their real output.

    python scripts/picture.py docs/pictures/demo.svg

The commands run in a temporary folder. Nothing is edited but the paths of this checkout, which are shown
relative to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
WIDTH = 112
COMMANDS = (
    "hpctrain data pack digits data/digits",
    "hpctrain launch -n 4 --ranks-per-node 2 -- hpctrain train examples/digits.toml",
    "hpctrain checkpoint list runs/digits/checkpoints",
)
# Rich's own template loads a font from the network; a picture in a README may not, and needs none.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
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
    """stdout and stderr of `command` as a terminal would show them. Raises CalledProcessError if it fails."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), cwd=directory, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=True, timeout=600,
    )  # fmt: skip
    return done.stdout.replace(f"{REPOSITORY}{os.sep}", "").rstrip()


def draw(commands: tuple[str, ...], *, directory: Path) -> str:
    """The SVG text."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, highlight=False)
        for command in commands:
            console.print(Text(f"$ {command}", style="bold"))
            console.print(Text(run(command, directory=directory)))
        return console.export_svg(title="hpctrain", theme=MONOKAI, code_format=SVG, unique_id="demo")


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="hpctrain-picture-") as name:
        (Path(name) / "examples").symlink_to(REPOSITORY / "examples")
        svg = draw(COMMANDS, directory=Path(name))
    # Trailing blanks of the lines are drawn as text of their own: they only make the file larger.
    svg = re.sub(r"<text [^>]*>(&#160;|\s)*</text>", "", svg)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(line for line in svg.splitlines() if line.strip()) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
