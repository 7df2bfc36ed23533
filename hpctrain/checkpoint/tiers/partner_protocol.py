"""The protocol of two nodes' leaders over a TCP connection: mutual authentication, then messages and file content.

Both sides prove that they know the run's token without sending it (HMAC-SHA256 over fresh random numbers of both). So
no other client can store files here, and another server at the partner's address receives none. The data that follows
is hashed, but not encrypted.

    server -> client   16 bytes: the server's random number
    client -> server   16 bytes: the client's random number; 32 bytes: proof
    server -> client   32 bytes: proof
    then messages: 4 bytes length, JSON
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import CheckpointError

_NUMBER_BYTES = 16
_PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 64 << 10
_BETWEEN_TRIES_S = 0.25
HANDSHAKE_WITHIN_S = 10.0


class PartnerError(CheckpointError):
    """The other node's leader cannot be reached, does not answer, or refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerAddress:
    """Where a node's leader accepts copies. node: unique name of the node, used in messages and in the proof.
    addresses: all addresses at which it may be reachable."""

    node: str
    addresses: tuple[str, ...]
    port: int

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "addresses": list(self.addresses), "port": self.port}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PartnerAddress:
        return cls(node=value["node"], addresses=tuple(value["addresses"]), port=value["port"])


def connect(partner: PartnerAddress, *, token: bytes, timeout_s: float, within_s: float) -> socket.socket:
    """Returns an authenticated connection to the partner, with a timeout of `timeout_s` for each wait.

    Tries all addresses in turn, repeatedly, for at most `within_s`. Each attempt has a shorter limit, so that an
    address that never answers (behind a firewall) leaves time for the others. Raises PartnerError.
    """
    deadline, reasons = time.monotonic() + within_s, dict[str, str]()
    each_s = within_s / (2 * max(1, len(partner.addresses)))
    while True:
        for address in partner.addresses:
            left_s = deadline - time.monotonic()
            if left_s <= 0 and reasons:
                break
            try:
                return _connect_to(
                    address, partner, token=token, timeout_s=timeout_s, within_s=max(min(left_s, each_s), 0.1)
                )
            except (OSError, PartnerError) as error:
                reasons[address] = str(error)
        if time.monotonic() + _BETWEEN_TRIES_S >= deadline:
            tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
            raise PartnerError(
                f"node {partner.node} cannot be reached over TCP at port {partner.port} "
                f"({tried or 'it has no address but loopback'}): is the node up, and are connections between "
                "the nodes allowed?"
            )
        time.sleep(_BETWEEN_TRIES_S)


def _connect_to(
    address: str, partner: PartnerAddress, *, token: bytes, timeout_s: float, within_s: float
) -> socket.socket:
    deadline = time.monotonic() + within_s
    connection = socket.create_connection((address, partner.port), timeout=within_s)
    try:
        # Another server at this address may accept and send nothing, or a byte now and then.
        theirs = _receive_by(deadline, connection, _NUMBER_BYTES)
        ours = secrets.token_bytes(_NUMBER_BYTES)
        connection.sendall(ours + _proof(token, b"client", partner.node, theirs, ours))
        proof = _receive_by(deadline, connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(token, b"server", partner.node, theirs, ours)):
            raise PartnerError("another server than this run's partner answers there")
        connection.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, *, node: str, token: bytes, timeout_s: float) -> None:
    """The server's side of `connect`. Takes at most the smaller of `timeout_s` and HANDSHAKE_WITHIN_S, however slowly
    the client sends; then sets a timeout of `timeout_s` for each wait. Raises PartnerError or OSError."""
    within_s = min(timeout_s, HANDSHAKE_WITHIN_S)
    deadline = time.monotonic() + within_s
    connection.settimeout(within_s)
    ours = secrets.token_bytes(_NUMBER_BYTES)
    connection.sendall(ours)
    theirs = _receive_by(deadline, connection, _NUMBER_BYTES)
    proof = _receive_by(deadline, connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"client", node, ours, theirs)):
        raise PartnerError("the client did not authenticate: its proof does not match")
    connection.sendall(_proof(token, b"server", node, ours, theirs))
    connection.settimeout(timeout_s)


def _proof(token: bytes, role: bytes, node: str, server_number: bytes, client_number: bytes) -> bytes:
    text = role + b"\0" + server_number + client_number + node.encode()
    return hmac.digest(token, text, hashlib.sha256)


def send_message(connection: socket.socket, value: Mapping[str, Any]) -> None:
    """Sends one message. Raises OSError."""
    data = json.dumps(dict(value)).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Returns the next message. Raises PartnerError if it is too long or not a JSON object, and OSError."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise PartnerError(f"a message of {length} bytes was announced")
    try:
        value = json.loads(receive_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise PartnerError(f"a message is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise PartnerError("a message is not a JSON object")
    return value


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next `num_bytes` bytes. Raises PartnerError if the connection ends before, and OSError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view.nbytes:
        view = view[receive_some(connection, view) :]
    return bytes(data)


def _receive_by(deadline: float, connection: socket.socket, num_bytes: int) -> bytes:
    """As `receive_exactly`, but raises TimeoutError unless all bytes arrive by `deadline` of the monotonic clock.

    The socket's own timeout restarts with every byte.
    """
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view.nbytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        view = view[receive_some(connection, view) :]
    return bytes(data)


def receive_some(connection: socket.socket, view: memoryview) -> int:
    """Receives at least one byte into `view`. Returns the number of bytes. Raises PartnerError at the end of the
    connection, and OSError."""
    count = connection.recv_into(view)
    if count == 0:
        raise PartnerError("the other side closed the connection")
    return count


def has_spoken(connection: socket.socket) -> bool:
    """True if there is data to read or the connection has ended. Does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def discard(connection: socket.socket, *, within_s: float) -> None:
    """Reads and drops data until the other side closes the connection, for at most `within_s`. Closing it earlier would
    reset it and lose the last message sent."""
    deadline, view = time.monotonic() + within_s, memoryview(bytearray(1 << 16))
    with suppress(OSError, PartnerError):
        connection.shutdown(socket.SHUT_WR)
        while (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            receive_some(connection, view)


def close(connection: socket.socket) -> None:
    """Closes the connection and wakes a thread that is blocked on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def describe_failure(error: Exception, *, timeout_s: float) -> str:
    """Returns the text for an error of a connection."""
    if isinstance(error, TimeoutError):
        return f"no answer for {timeout_s:g} s"
    return str(error)


def local_addresses(found: Sequence[str]) -> tuple[str, ...]:
    """Returns `found` with loopback as the last address, for nodes emulated on one machine without a network."""
    return (*found, "127.0.0.1")
