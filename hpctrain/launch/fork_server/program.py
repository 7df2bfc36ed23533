"""Recognizes command lines that run a program with hpctrain's own Python.

Only such a program can run in a process that is forked from a server with preloaded libraries.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

# Options of Python without a value: the server is started with the same ones.
_OPTIONS = "bBdEiIOPqsSuv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program: either `script` or `module` is set.

    python: absolute path of the interpreter.
    options: options of the interpreter.
    script: path of the script, as given.
    module: name of the module after `-m`.
    arguments: arguments of the program.
    title: name of the executable file, which `ps` shows.
    """

    python: str
    options: tuple[str, ...]
    script: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    title: str = "python"


def read_program(command: Sequence[str]) -> Program | str:
    """Returns the Python program that a command line runs, or a text that says why the command cannot be forked.

    Of a script, only the first line is read.
    """
    found = shutil.which(command[0])
    if found is None:
        return f"{command[0]} is not a program"
    if PurePath(found).name.startswith("python"):
        return _of_python(found, command[1:], title=PurePath(found).name)
    python = _interpreter_of(Path(found))
    if python is None:
        return f"{PurePath(found).name} is not a Python program"
    # A script on the PATH is given to Python with its whole path.
    return _checked(
        Program(
            python=python, options=(), script=found, arguments=tuple(command[1:]), title=PurePath(found).name
        )
    )


def _of_python(python: str, words: Sequence[str], *, title: str) -> Program | str:
    options: list[str] = []
    for at, word in enumerate(words):
        rest = tuple(words[at + 1 :])
        if word == "-m" and rest:
            return _checked(
                Program(
                    python=python, options=tuple(options), module=rest[0], arguments=rest[1:], title=title
                )
            )
        if not word.startswith("-"):
            return _checked(
                Program(python=python, options=tuple(options), script=word, arguments=rest, title=title)
            )
        if word == "-" or not set(word[1:]) <= set(_OPTIONS):
            return f"Python's option {word} is not one that hpctrain knows"
        options.append(word)
    return "Python has no program to run"


def _interpreter_of(script: Path) -> str | None:
    """Returns the Python that a script's first line names; None if it names none, or gives Python options."""
    try:
        with script.open("rb") as file:
            line = file.readline(512)
    except OSError:
        return None
    words = os.fsdecode(line[2:].strip()).split() if line.startswith(b"#!") else []
    if len(words) == 2 and PurePath(words[0]).name == "env":
        words = [shutil.which(words[1]) or ""]
    return words[0] if len(words) == 1 and PurePath(words[0]).name.startswith("python") else None


def _checked(program: Program) -> Program | str:
    here, there = Path(sys.executable), Path(program.python)
    if there.parent.absolute() != here.parent.absolute() or os.path.realpath(there) != os.path.realpath(here):
        return f"{there} is a different Python from hpctrain's ({here})"
    return program
