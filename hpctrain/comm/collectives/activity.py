"""Labels for what a rank is doing, shown in the watchdog's messages: "saving checkpoint step 50: writing"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from hpctrain.comm.interface.communicator import Collective


@runtime_checkable
class SaysWhatItDoes(Protocol):
    """A communicator whose operations have a deadline."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Labels the operations inside the `with` block."""


@contextlib.contextmanager
def doing(comm: Collective, what: str) -> Iterator[None]:
    """Labels the `with` block in the message that is printed when ranks wait too long in it. Not collective.

    The innermost label is used. No effect on a communicator without a deadline.
    """
    if isinstance(comm, SaysWhatItDoes):
        with comm.doing(what):
            yield
    else:
        yield
