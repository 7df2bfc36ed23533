"""The picture in the README is of what the commands in it print now."""

from __future__ import annotations

import html
import importlib.util
import os
import re
from types import ModuleType

import pytest

from hpctrain.launch import survey_machine
from hpctrain.launch.placement import MpirunFamily
from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

PICTURE = REPOSITORY / "docs" / "pictures" / "demo.svg"
NUMBER = re.compile(r"(?<![\w.])[\d.,:e+-]*\d[\d.,:e+-]*(?!\w)")
# The same run, shorter: lines of progress and checkpoints are fewer then, and of the same kinds.
SHORTER = "--set run.epochs=1 --set optimizer.warmup_steps=1 --set telemetry.progress_every_s=0.01"


def picture_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", REPOSITORY / "scripts" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(lines: list[str]) -> set[str]:
    """The lines with numbers, blanks and what depends on the machine taken out, each once."""
    found = set()
    for line in lines:
        line = line.replace(f" {SHORTER}", "")
        line = re.sub(r"\S+/mpirun\b", "mpirun", line)
        line = re.sub(r"OMPI_ALLOW_RUN_AS_ROOT\w*=1 ", "", line)
        line = re.sub(r"^checkpoints: \w+ \(.*?\),", "checkpoints: ENGINE (WHY),", line)
        line = NUMBER.sub("#", line)
        if line.endswith(": # of # #%"):  # of `data pack`, when it takes longer than a few seconds
            continue
        found.add(" ".join(line.split()))
    mpirun = survey_machine().mpirun
    # The launch differs where the ranks need not share cores, and with another MPI than the picture's.
    if len(os.sched_getaffinity(0)) >= 4 or mpirun is None or mpirun.family is not MpirunFamily.OPEN_MPI_4:
        found = {line for line in found if not line.startswith("hpctrain launch:")}
    return found


def transcript() -> list[str]:
    found = re.search(r"<desc>(.*?)</desc>", PICTURE.read_text(), flags=re.DOTALL)
    assert found is not None
    return html.unescape(found[1]).splitlines()


def test_the_picture_shows_what_its_commands_print_now() -> None:
    script = picture_script()
    shown = transcript()
    assert [line for line in shown if line.startswith("$ ")] == [
        f"$ {command}" for command in script.COMMANDS
    ]
    commands = tuple(
        f"{command} {SHORTER}" if "hpctrain train" in command else command for command in script.COMMANDS
    )
    printed = [line for text in script.outputs(commands) for line in text.splitlines()]
    is_now, was = kinds(printed), kinds([line for line in shown if not line.startswith("$ ")])
    assert is_now == was, "the commands print something else than docs/pictures/demo.svg shows: make picture"


def test_what_is_drawn_is_the_transcript() -> None:
    drawn = re.findall(r'<text class="demo-r\d+"[^>]*>(.*?)</text>', PICTURE.read_text())
    text = "".join(html.unescape(part) for part in drawn)
    assert "".join(text.split()) == "".join("".join(transcript()).split())


def test_the_picture_names_no_place_of_the_machine_it_was_made_on() -> None:
    allowed = {"/usr/bin/mpirun"}
    places = set(re.findall(r"(?<![\w.<])/(?:[\w.-]+/)*[\w.-]+", "\n".join(transcript())))
    assert {place for place in places if place.count("/") > 1} <= allowed
