"""The program of the fork server, which `_fork_client.c` starts.

The command line is `python OPTIONS .../fork_server/__main__.py COMMAND...`. A process that the server forks returns
from `serve` and runs COMMAND here, so that the process ends as Python programs end.
"""

from __future__ import annotations

import sys

at_start = frozenset(sys.modules)
del sys.path[0]  # this folder

import os  # noqa: E402

from hpctrain.launch.fork_server.run_program import run_program  # noqa: E402
from hpctrain.launch.fork_server.serve import serve  # noqa: E402

if __name__ == "__main__":
    program = serve(sys.argv[1:], directory=os.getcwd(), at_start=at_start)
    if program is not None:
        run_program(program)
