"""Say what the ranks are about, for the message of a deadline: "saving checkpoint step 50: writing"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from hpctrain.comm.interface.communicator import Collective


@runtime_checkable
class SaysWhatItDoes(Protocol):
    """A communicator with a deadline."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """What the operations inside belong to."""


@contextlib.contextmanager
def doing(comm: Collective, what: str) -> Iterator[None]:
    """What this rank is about inside, told where it waits for others or they for it. Not collective.

    The innermost counts. Without effect on a communicator that has no deadline.
    """
    if isinstance(comm, SaysWhatItDoes):
        with comm.doing(what):
            yield
    else:
        yield
