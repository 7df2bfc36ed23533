"""What a rank is doing: labels for the watchdog's messages, and sections of a run, which have their own time limits.

An example of a label is "saving checkpoint step 50: writing".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

from hpctrain.comm.interface.communicator import Collective


class Section(str, Enum):
    """Parts of a run, such as a step. Waits in each part have their own time limit (see `section_limits`)."""

    START = "start"
    STEP = "step"
    SAVE = "save"
    LOAD = "load"
    INPUT = "input"

    def __str__(self) -> str:
        return str(self.value)


@runtime_checkable
class SaysWhatItDoes(Protocol):
    """A communicator whose operations have a deadline, and which therefore accepts labels and sections."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Labels the operations inside the `with` block."""

    def section(self, section: Section | None) -> AbstractContextManager[None]:
        """Marks the `with` block as part of `section` of the run."""

    def without_limit(self) -> AbstractContextManager[None]:
        """Suspends the deadline for this communicator's operations inside the `with` block."""


@cache  # a check against a protocol takes 15 us, and each step makes several
def _is_kind_that_says(kind: type) -> bool:
    return issubclass(kind, SaysWhatItDoes)


def _says_what_it_does(comm: Collective) -> TypeGuard[SaysWhatItDoes]:
    return _is_kind_that_says(type(comm))


@contextlib.contextmanager
def doing(comm: Collective, what: str) -> Iterator[None]:
    """Labels the `with` block in the message that is printed if ranks wait too long in it. Not collective.

    The innermost label is shown. Has no effect on a communicator without a deadline.
    """
    if _says_what_it_does(comm):
        with comm.doing(what):
            yield
    else:
        yield


@contextlib.contextmanager
def in_section(comm: Collective, section: Section | None) -> Iterator[None]:
    """Applies the time limit of `section` to the operations in the `with` block.

    This does not communicate, but every rank must enter and leave the section at the same place in its sequence of
    operations. The innermost section counts; None means no section, so that the limit of the whole run applies. Has no
    effect on a communicator without a deadline.
    """
    if _says_what_it_does(comm):
        with comm.section(section):
            yield
    else:
        yield


@contextlib.contextmanager
def without_limit(comm: Collective) -> Iterator[None]:
    """Lets operations of `comm` in the `with` block wait without a deadline. Not collective.

    Use it on a rank that has nothing to do until other ranks call. Has no effect on a communicator without a deadline.
    """
    if _says_what_it_does(comm):
        with comm.without_limit():
            yield
    else:
        yield
