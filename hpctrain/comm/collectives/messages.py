"""Messages between two ranks that wait until they have arrived, under the watchdog's deadline."""

from __future__ import annotations

import torch

from hpctrain.comm.interface.polling import poll_until
from hpctrain.comm.interface.transport import Pending, Transport


def send_message(transport: Transport, buffer: torch.Tensor, *, to: int, what: str) -> None:
    """Sends `buffer`, shape (n,), uint8, and waits until it may be used again. what: for messages of the watchdog."""
    _wait(transport, transport.send(buffer, to=to, tag=0), what=what)


def receive_message(transport: Transport, buffer: torch.Tensor, *, source: int, what: str) -> None:
    """Receives into `buffer`, shape (n,), uint8. what: for messages of the watchdog."""
    _wait(transport, transport.receive(buffer, source=source, tag=0), what=what)


def _wait(transport: Transport, pending: Pending, *, what: str) -> None:
    if transport.all_done([pending]):
        return
    transport.waits(what)
    poll_until(lambda: transport.all_done([pending]))
    transport.progressed()
