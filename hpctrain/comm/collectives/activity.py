"""What a rank is doing: labels for the watchdog's messages ("saving checkpoint step 50: writing"), and sections of a
run, which have time limits of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol, runtime_checkable

from hpctrain.comm.interface.communicator import Collective


class Section(str, Enum):
    """Parts of a run whose waits have time limits of their own (`hpctrain.comm.watchdog.section_limits`)."""

    START = "start"
    STEP = "step"
    SAVE = "save"
    LOAD = "load"
    INPUT = "input"

    def __str__(self) -> str:
        return str(self.value)


@runtime_checkable
class SaysWhatItDoes(Protocol):
    """A communicator whose operations have a deadline."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Labels the operations inside the `with` block."""

    def section(self, section: Section | None) -> AbstractContextManager[None]:
        """Marks the section of the run in which the `with` block is."""

    def without_limit(self) -> AbstractContextManager[None]:
        """Lets this communicator's operations inside the `with` block take as long as they will."""


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


@contextlib.contextmanager
def in_section(comm: Collective, section: Section | None) -> Iterator[None]:
    """Has the time limit of `section` apply to the operations in the `with` block. Not collective, but every rank has
    to do it at the same place.

    The innermost section counts. None: something that is in no section, for which the limit of the whole run applies.
    No effect on a communicator without a deadline.
    """
    if isinstance(comm, SaysWhatItDoes):
        with comm.section(section):
            yield
    else:
        yield


@contextlib.contextmanager
def without_limit(comm: Collective) -> Iterator[None]:
    """Lets operations of `comm` in the `with` block wait as long as they will. Not collective.

    For a rank that has nothing to do until others call it. No effect on a communicator without a deadline.
    """
    if isinstance(comm, SaysWhatItDoes):
        with comm.without_limit():
            yield
    else:
        yield
