"""Exceptions of the Horovod interface: subclasses of hpctrain's errors with the classes that Horovod scripts catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpctrain.errors import CommunicationError, UsageError


class HorovodInternalError(CommunicationError, RuntimeError):
    """A collective operation failed, or ranks called different operations.

    `agreed` is True if every rank of the process set that has not joined raises the error.
    """


class HorovodValueError(UsageError, ValueError, RuntimeError):
    """An argument is invalid, or `hvd.init` was not called.

    The class is a ValueError and a RuntimeError, since Horovod raises either for such mistakes.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The exception that Horovod raises when hosts come or go.

    hpctrain never raises it: the ranks of an MPI job are fixed.
    """


@contextlib.contextmanager
def as_horovod_error() -> Iterator[None]:
    """Turns a CommunicationError of the `with` block into a HorovodInternalError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except CommunicationError as error:
        raise HorovodInternalError(str(error), agreed=error.agreed) from error
