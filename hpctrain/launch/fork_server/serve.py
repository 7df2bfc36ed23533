"""The stages of a fork server, from its start to a forked rank: import, check, serve, become."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from hpctrain.launch.fork_server.become import become, end_without_destructors, replace_environ
from hpctrain.launch.fork_server.likeness import Likeness, is_per_rank
from hpctrain.launch.fork_server.plan import PRELOAD_VARIABLE
from hpctrain.launch.fork_server.preload import (
    Imported,
    all_are_known,
    folder_of,
    import_all,
    modules_for,
    share_memory_pages,
)
from hpctrain.launch.fork_server.program import Program, read_program
from hpctrain.launch.fork_server.server import LISTENS_AT, Server, cannot_fork, ignore_batch_signals


def serve(command: Sequence[str], *, directory: str, at_start: frozenset[str]) -> Program | None:
    """Runs the server. In the server's process, this function returns None when the server has ended.

    In each rank that the server has forked, this function returns the program that the rank must run.

    at_start: names of the modules that Python itself had imported when it started.
    """
    ignore_batch_signals()
    gc.disable()  # until a rank runs
    own = Likeness.of(os.getpid())
    preload = [name for name in os.environ.get(PRELOAD_VARIABLE, "").split(",") if name]
    # Also in /proc: `hpctrain supervise` finds the ranks of an earlier attempt by a variable, and ends them.
    replace_environ({name: value for name, value in os.environ.items() if not is_per_rank(name)})
    found = read_program(command)
    program, refusal = (None, found) if isinstance(found, str) else (found, None)
    imported = Imported(None if program is None else folder_of(program, directory=directory), at_start)
    if program is not None:
        refusal = cannot_fork() or import_all(modules_for(program, directory=directory, preload=preload))
    share_memory_pages()
    server = Server(LISTENS_AT, program=program, imported=imported, own=own, refusal=refusal)
    server.remove_abandoned()
    keep = {int(name) for name in os.listdir("/proc/self/fd") if int(name) < 200} - {0, 1, 2}
    forked = server.run()
    if forked is None:
        return None
    if all_are_known(preload, libraries=own.environ.get("LD_PRELOAD", "")):
        end_without_destructors()
    words = _words(forked.program)
    gc.enable()
    imported.move_to(forked.folder)
    become(forked.request, title=forked.program.title, command=words, keep=keep)
    return forked.program


def _words(program: Program) -> list[str]:
    start = [program.python, *program.options]
    if program.module is not None:
        return [*start, "-m", program.module, *program.arguments]
    assert program.script is not None
    return [*start, program.script, *program.arguments]
