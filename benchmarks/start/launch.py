"""`hpctrain launch --fork-server`, with a server that several launches share:

    python -m benchmarks.start.launch KEY LINGERS_S -n 2 -- COMMAND

This is the command itself, so that it costs what the command costs; only the server's key and how long it waits for
the next launch are others, for which the command has no options.
"""

from __future__ import annotations

import functools
import os
import sys
from unittest import mock

from hpctrain.launch import ForkServer


def main(key: str, lingers_s: str, *words: str) -> None:
    sys.argv = ["hpctrain", "launch", "--fork-server", *words]  # read by the import
    from hpctrain.cli import launch
    from hpctrain.cli.main import main as command

    # The server may outlive this process, but not the one that starts the launches.
    shared = functools.partial(ForkServer, key=key, lingers_s=float(lingers_s), owner=os.getppid())
    with mock.patch.object(launch, "ForkServer", shared):
        command()


if __name__ == "__main__":
    main(*sys.argv[1:])
