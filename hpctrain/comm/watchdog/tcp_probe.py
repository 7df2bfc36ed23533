"""Asks the kernels of other hosts for an answer: a TCP connection that is accepted or refused proves that a host is up.

Loads neither torch nor MPI, so that a program that only watches nodes stays small.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

# An answer from the host's kernel, whether or not something listens on the port by now.
ANSWERS = (0, errno.ECONNREFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """A host, the addresses by which others may reach it, and a port, as one that a rank of it has reserved."""

    host: str
    addresses: tuple[str, ...]
    port: int


def probe_hosts(
    targets: Sequence[ProbeTarget],
    *,
    timeout_s: float,
    own: Sequence[str] = (),
    answers: Sequence[int] = ANSWERS,
) -> dict[str, bool]:
    """Returns host -> whether its kernel answered at any of its addresses. Takes at most `timeout_s` for all together.

    own: addresses of this host, which other hosts may have too (the bridge of a container runtime); they are left out.
    answers: the outcomes (0 or an errno) that count; only 0 asks for a program that listens on the port.
    """
    found = {target.host: False for target in targets if set(target.addresses) - set(own)}
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for target in targets:
            for address in target.addresses:
                if address not in own:
                    _begin(selector, target, address=address, found=found, answers=answers)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0 and not all(found.values()):
            for key, _ in selector.select(left_s):
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                found[key.data] |= caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in answers
                selector.unregister(caller)
                caller.close()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return found


def _begin(
    selector: selectors.BaseSelector,
    target: ProbeTarget,
    *,
    address: str,
    found: dict[str, bool],
    answers: Sequence[int],
) -> None:
    """Begins a connection; `selector` then holds it with the name of the host, unless its outcome is known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return
    code = caller.connect_ex((address, target.port))
    if code != errno.EINPROGRESS:
        found[target.host] |= code in answers
        caller.close()
        return
    selector.register(caller, selectors.EVENT_WRITE, target.host)
