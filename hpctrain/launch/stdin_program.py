"""Commands that read their program from standard input, which mpirun passes to rank 0 only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from hpctrain.errors import LaunchError

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|(ba|da|z|k|mk|a|c|tc|fi)?sh")
_STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
# Options of Python that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Options after which no script follows: a command, a module, or a request for information.
_PROGRAM_GIVEN = ("-c", "-m", "-V", "-VV", "--version", "-h", "--help")


def refuse_program_on_stdin(command: Sequence[str]) -> None:
    """Raises LaunchError if each rank of `command` would read its program from standard input."""
    if reads_program_from_stdin(command):
        raise LaunchError(
            f"`{' '.join(command)}` reads its program from standard input, which reaches one rank, or one start, only: "
            f"save the program as a file and launch `{command[0]} FILE`"
        )


def reads_program_from_stdin(command: Sequence[str]) -> bool:
    """Returns True for an interpreter (Python, a shell) without a script, also behind `env`. Pure."""
    words = list(command)
    if words and PurePath(words[0]).name == "env":
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[2:] if words[0] in ("-u", "-C", "-S") else words[1:]
    if not words or not _INTERPRETER.fullmatch(PurePath(words[0]).name):
        return False
    is_python = "py" in PurePath(words[0]).name
    place = 1
    while place < len(words):
        word = words[place]
        if word in _STDIN or (word == "-s" and not is_python):
            return True
        if not word.startswith(("-", "+")):
            return False
        letters = "" if word.startswith(("--", "-W", "-X")) else word[1:]
        if word in _PROGRAM_GIVEN or "c" in letters or (is_python and "m" in letters):
            return False
        place += 2 if word in _WITH_VALUE and is_python else 1
    return True
