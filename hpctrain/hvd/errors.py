"""Exceptions of the Horovod interface: hpctrain's own, which are also what a Horovod script catches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpctrain.errors import CommunicationError, UsageError


class HorovodInternalError(CommunicationError, RuntimeError):
    """A collective operation failed, or ranks called different ones. `agreed`: every rank of the set raises it that has
    not joined."""


class HorovodValueError(UsageError, ValueError, RuntimeError):
    """An argument is wrong, or `hvd.init` was not called. Horovod raises ValueError for some of these, RuntimeError for
    others."""


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod raises it when hosts come or go. Never raised here, since the ranks of an MPI job stay the same."""


@contextlib.contextmanager
def as_horovod_error() -> Iterator[None]:
    """Raises a CommunicationError of the `with` block as HorovodInternalError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except CommunicationError as error:
        raise HorovodInternalError(str(error), agreed=error.agreed) from error
