"""Copies each node's file to a partner node, so that the loss of one node loses no data.

The leader of a node is its lowest rank. Each leader runs a `PartnerServer` in a thread, which stores the files that the
leader of another node sends with `send_file`. The files are sent over TCP, since most MPI builds allow only one thread
to call MPI.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

import xxhash

from hpctrain.checkpoint.tiers.drain import DrainedFile, NewFile, Pace, file_pieces
from hpctrain.comm import host_addresses
from hpctrain.errors import CheckpointError, HpctrainError

# The protocol of two nodes' leaders over a TCP connection: mutual authentication, then messages and file
# content.
#
# Both sides prove that they know the run's token without sending it (HMAC-SHA256 over fresh random numbers
# of both). So no other client can store files here, and another server at the partner's address receives
# none. The data that follows is hashed, but not encrypted.
#
#     server -> client   16 bytes: the server's random number
#     client -> server   16 bytes: the client's random number; 32 bytes: proof
#     server -> client   32 bytes: proof
#     then messages: 4 bytes length, JSON


_NUMBER_BYTES = 16
_PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 64 << 10
_BETWEEN_TRIES_S = 0.25
HANDSHAKE_WITHIN_S = 10.0


class PartnerError(CheckpointError):
    """Raised if the other node's leader (lowest rank) cannot be reached, does not answer, or refuses a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerAddress:
    """Network address at which a node's leader (lowest rank) accepts copies of another node's checkpoint files.

    `node` is the unique name of the node, used in messages and in the handshake. `addresses` contains all addresses
    at which the node may be reachable, all with the same port.
    """

    node: str
    addresses: tuple[str, ...]
    port: int

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "addresses": list(self.addresses), "port": self.port}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PartnerAddress:
        return cls(node=value["node"], addresses=tuple(value["addresses"]), port=value["port"])


def connect(partner: PartnerAddress, *, token: bytes, timeout_s: float, within_s: float) -> socket.socket:
    """Connects to the server of a partner node, and returns the authenticated connection. Raises PartnerError.

    `token` is the secret that the leaders (lowest ranks of the nodes) of the run share. All addresses are tried in
    turn, repeatedly, for at most `within_s` seconds. Each attempt has a shorter limit, so that an address that never
    answers (behind a firewall) leaves time for the others. Later waits on the connection are limited to `timeout_s`
    seconds each.
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
    """Authenticates a new connection: the server's side of the handshake in `connect`.

    `node` is the name of this node, and `token` the secret that all leaders of the run share. Raises PartnerError or
    OSError. The handshake takes at most the smaller of `timeout_s` and HANDSHAKE_WITHIN_S, however slowly the client
    sends. Later waits on the connection are limited to `timeout_s` seconds each.
    """
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


def send_partner_message(connection: socket.socket, value: Mapping[str, Any]) -> None:
    """Sends one message, the JSON object `value`. Raises OSError."""
    data = json.dumps(dict(value)).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_partner_message(connection: socket.socket) -> dict[str, Any]:
    """Returns the next message. Raises PartnerError if the message is too long or not a JSON object, and OSError."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise PartnerError(f"a message of {length} bytes was announced; the limit is {_MAX_MESSAGE_BYTES}")
    try:
        value = json.loads(receive_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise PartnerError(f"a message is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise PartnerError("a message is not a JSON object")
    return value


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next `num_bytes` bytes. Raises PartnerError if the connection ends earlier, and OSError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view.nbytes:
        view = view[receive_some(connection, view) :]
    return bytes(data)


def _receive_by(deadline: float, connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next `num_bytes` bytes. Raises TimeoutError unless they arrive by `deadline` (monotonic clock).

    The socket's own timeout does not suffice, since it restarts with every byte. Raises PartnerError if the connection
    ends earlier, and OSError.
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
    """Receives at least one byte into `view`, and returns the number of bytes.

    Raises PartnerError at the end of the connection, and OSError.
    """
    count = connection.recv_into(view)
    if count == 0:
        raise PartnerError("the other side closed the connection")
    return count


def has_spoken(connection: socket.socket) -> bool:
    """Returns True if the other side has sent data or has ended the connection. Does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def discard(connection: socket.socket, *, within_s: float) -> None:
    """Reads and drops data until the other side closes the connection, for at most `within_s` seconds.

    Closing the connection earlier would reset it and lose the last message sent.
    """
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
    """Returns a message for `error`, which was raised while a connection with the time limit `timeout_s` was used."""
    if isinstance(error, TimeoutError):
        return f"no answer for {timeout_s:g} s"
    return str(error)


def local_addresses(found: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses `found`, and the loopback address after them.

    The loopback address is needed if nodes are emulated on one machine without a network.
    """
    return (*found, "127.0.0.1")


# Copies each node's file to a partner node, so that the loss of one node loses no data.


_CHUNK_BYTES = 1 << 20
_MAX_UNPROVEN = 8  # unauthenticated connections at a time; a new one closes the oldest
_DIGEST_BYTES = 16
_KEPT_FREE_BYTES = 64 << 20
_DISCARD_S = 5.0
DEFAULT_TIMEOUT_S = 60.0
CONNECT_WITHIN_S = 20.0
GREET_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Describes a checkpoint file that one node offers to another node as a copy.

    Attributes:
        step: Step of the checkpoint.
        save_id: Identifier of the save that wrote the file.
        file: Index of the file in the checkpoint, from 0.
        num_files: Number of files of the checkpoint.
        num_bytes: Length of the file.
        created_unix_s: Start of the save, in seconds since 1970.
    """

    step: int
    save_id: str
    file: int
    num_files: int
    num_bytes: int
    created_unix_s: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Offer:
        """Decodes an offer, the description of an offered file, from JSON.

        Raises PartnerError if a value has a wrong type or is out of range.
        """
        numbers = {name: value.get(name) for name in ("step", "file", "num_files", "num_bytes")}
        for name, found in numbers.items():
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 10**18:
                raise PartnerError(
                    f"the offered file has {name} = {found!r:.40}, not an integer from 0 to 10^18 - 1"
                )
        save_id = value.get("save_id")
        if not isinstance(save_id, str) or len(save_id) > 32 or set(save_id) - set("0123456789abcdef"):
            raise PartnerError(f"the offered file has save_id = {save_id!r:.40}, not up to 32 hex digits")
        if not numbers["file"] < numbers["num_files"] <= 99999:  # type: ignore[operator]  # checked above
            raise PartnerError(
                f"the offered file has index {numbers['file']} among {numbers['num_files']} files: out of range"
            )
        created = value.get("created_unix_s")
        if not isinstance(created, float) or not 0 <= created < 1e12:
            raise PartnerError(f"the offered file has created_unix_s = {created!r:.40}")
        return cls(save_id=save_id, created_unix_s=created, **numbers)  # type: ignore[arg-type]  # checked above


class Shelf(Protocol):
    """Interface of the storage in which a server puts the files that another node sends.

    `place(offer)` returns the path, in an existing folder, to which the server writes the offered file. `keep(offer,
    path, digest)` is called when the file is complete and on disk. It makes the file at `path` valid; `digest` is the
    hash of the file. Both may raise CheckpointError or OSError; the server reports the error to the sender.
    """

    def place(self, offer: Offer) -> Path: ...

    def keep(self, offer: Offer, path: Path, digest: str) -> None: ...


@final
class PartnerServer:
    """Receives checkpoint files from the leader (lowest rank) of another node, in separate threads, until `close`.

    `address` is where other nodes' leaders connect; `token` is a secret shared by the run's leaders; `timeout_s` is
    the longest time without data on a connection. A connection that does not authenticate is closed after
    HANDSHAKE_WITHIN_S, or sooner if _MAX_UNPROVEN newer connections exist, so that unknown clients cannot lock out
    the partner. Each authenticated connection uses 1 MiB of memory. Raises CheckpointError if the server cannot
    listen.
    """

    def __init__(
        self, *, node: str, token: bytes, shelf: Shelf, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._node = node
        self._token = token
        self._shelf = shelf
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unproven: dict[socket.socket, None] = {}  # connections not yet authenticated, oldest first
        self._closed = False
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._socket = socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=both)
        except OSError as error:
            raise CheckpointError(f"node {node} cannot listen for its partner node: {error}") from error
        self.address = PartnerAddress(
            node=node, addresses=local_addresses(host_addresses()), port=self._socket.getsockname()[1]
        )
        self._thread = threading.Thread(target=self._serve, name="hpctrain-partner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the listening port and all connections. Waits up to 5 s for the removal of unfinished files."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        close(self._socket)
        for connection in connections:
            close(connection)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with self._lock:
                if not self._connections:
                    break
            time.sleep(0.01)
        self._thread.join(timeout=1)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # probably out of file descriptors, which can be temporary
                continue
            with self._lock:
                if self._closed:
                    close(connection)
                    return
                if len(self._unproven) >= _MAX_UNPROVEN:
                    # The partner authenticates within milliseconds, so it is not the oldest.
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    close(oldest)
                self._connections.add(connection)
                self._unproven[connection] = None
            threading.Thread(
                target=self._attend, args=(connection,), name="hpctrain-partner-copy", daemon=True
            ).start()

    def _attend(self, connection: socket.socket) -> None:
        """Serves one connection until it ends. Errors are sent to the other node, which reports them to the user."""
        try:
            accept(connection, node=self._node, token=self._token, timeout_s=self._timeout_s)
            with self._lock:
                self._unproven.pop(connection, None)
            try:
                self._take(connection)
            except (OSError, HpctrainError) as error:
                reason = describe_failure(error, timeout_s=self._timeout_s)
                send_partner_message(connection, {"error": f"{reason}"[:2000]})
                discard(connection, within_s=_DISCARD_S)
        except (OSError, HpctrainError):
            pass  # not authenticated, or the connection is lost: no one to report to
        finally:
            close(connection)
            with self._lock:
                self._connections.discard(connection)
                self._unproven.pop(connection, None)

    def _take(self, connection: socket.socket) -> None:
        request = receive_partner_message(connection)
        if request.get("hello"):
            send_partner_message(connection, {"done": True})
            return
        offer = Offer.from_json(request)
        path = self._shelf.place(offer)
        _check_space(path.parent, num_bytes=offer.num_bytes)
        with NewFile(path) as copy:
            send_partner_message(connection, {"go": True})
            view = memoryview(bytearray(_CHUNK_BYTES))
            while copy.num_bytes < offer.num_bytes:
                wanted = min(_CHUNK_BYTES, offer.num_bytes - copy.num_bytes)
                copy.write(view[: receive_some(connection, view[:wanted])])
            received_digest = receive_exactly(connection, _DIGEST_BYTES).decode("ascii", "replace")
            if received_digest != copy.digest():
                raise PartnerError(
                    f"the {copy.num_bytes} bytes arrived damaged: their hash is {copy.digest()}, not {received_digest}"
                )
            copy.finish()
            digest = copy.digest()
        try:
            self._shelf.keep(offer, path, digest)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        send_partner_message(connection, {"done": True})


def _check_space(directory: Path, *, num_bytes: int) -> None:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < num_bytes + _KEPT_FREE_BYTES:
        raise CheckpointError(f"{directory} has {free} bytes free, the copy needs {num_bytes}")


def greet(partner: PartnerAddress, *, token: bytes, within_s: float = GREET_WITHIN_S) -> PartnerAddress:
    """Checks that the server of a partner node answers within `within_s` seconds.

    Returns a copy of `partner` with only the one address that answered. Raises PartnerError.
    """
    connection = connect(partner, token=token, timeout_s=within_s, within_s=within_s)
    try:
        send_partner_message(connection, {"hello": True})
        _expect(connection, "done")
        return replace(partner, addresses=(connection.getpeername()[0],))
    except OSError as error:
        raise PartnerError(f"node {partner.node}: {describe_failure(error, timeout_s=within_s)}") from error
    finally:
        close(connection)


def send_file(
    path: Path,
    *,
    offer: Offer,
    partner: PartnerAddress,
    token: bytes,
    pace: Pace | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> DrainedFile:
    """Sends a file to a partner node. Returns when that node has verified the copy and flushed it to disk.

    Uses 1 MiB of memory.

    Args:
        path: The file.
        offer: Description of the file.
        partner: Address of the node to which the file is sent.
        token: Secret that the leaders (lowest ranks of the nodes) of the run share.
        pace: Rate limiter; None: no limit.
        timeout_s: Longest time to wait for an answer, in seconds.
        on_bytes: Called with the length of each piece. The function may raise to stop.

    Raises:
        PartnerError: If the partner cannot be reached or fails. The message states the partner's name and the
            error, and how many bytes were sent.
        CheckpointError: If `path` cannot be read.
    """
    begin_s = time.perf_counter()
    connection = connect(partner, token=token, timeout_s=timeout_s, within_s=CONNECT_WITHIN_S)
    digest, sent = xxhash.xxh3_64(), 0
    try:
        send_partner_message(connection, offer.to_json())
        _expect(connection, "go")
        try:
            for piece in file_pieces(path, chunk_bytes=_CHUNK_BYTES):
                if has_spoken(connection):
                    _expect(connection, "done")  # an answer before the end of the file can only be an error
                connection.sendall(piece)
                digest.update(piece)
                sent += piece.nbytes
                on_bytes(piece.nbytes)
                if pace is not None:
                    pace.passed(piece.nbytes)
            if sent != offer.num_bytes:
                raise CheckpointError(f"{path} has {sent} bytes, not {offer.num_bytes}")
            connection.sendall(digest.hexdigest().encode())
        except ConnectionError:
            # The partner closed the connection; most likely it has sent the reason.
            _expect(connection, "done")
            raise
        _expect(connection, "done")
    except (OSError, PartnerError) as error:
        reason = describe_failure(error, timeout_s=timeout_s)
        raise PartnerError(
            f"no copy of {path.name} on node {partner.node}, after {sent} of {offer.num_bytes} bytes: {reason}"
        ) from error
    finally:
        close(connection)
    return DrainedFile(num_bytes=sent, digest=digest.hexdigest(), seconds=time.perf_counter() - begin_s)


def _expect(connection: socket.socket, word: str) -> None:
    answer = receive_partner_message(connection)
    if "error" in answer:
        raise PartnerError(f"the node reports: {answer['error']!s:.2000}")
    if answer.get(word) is not True:
        raise PartnerError(f"unexpected answer {answer!r:.200}")
