"""Lines for the user on standard output."""

from __future__ import annotations

import os
import sys


def tell(text: str, *, end: str = "\n") -> None:
    """Print at once. A reader that has gone (`| head`) silences the output; it does not end the run."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        # Python flushes once more at its end, and would turn that error into exit code 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
