"""Copies each node's file to a partner node, so that the loss of one node loses no data.

Each node's leader runs a `PartnerServer` in a thread, which stores the files that the leader of another node sends
with `send_file`. It uses TCP, since most MPI builds allow only one thread to call MPI.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

import xxhash

from hpctrain.checkpoint.tiers.drain import DrainedFile, NewFile, Pace, pieces_of
from hpctrain.checkpoint.tiers.partner_protocol import (
    PartnerAddress,
    PartnerError,
    accept,
    close,
    connect,
    describe_failure,
    discard,
    has_spoken,
    local_addresses,
    receive_exactly,
    receive_message,
    receive_some,
    send_message,
)
from hpctrain.comm import host_addresses
from hpctrain.errors import CheckpointError, HpctrainError

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
    """A file that one leader offers to another.

    save_id: id of the save it belongs to. file: its number in the checkpoint. num_files: number of files of the
    checkpoint. num_bytes: length of this file. created_unix_s: start of the save.
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
        """Raises PartnerError if a value has a wrong type or is out of range, or the id is not of hex digits."""
        numbers = {name: value.get(name) for name in ("step", "file", "num_files", "num_bytes")}
        for name, found in numbers.items():
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 10**18:
                raise PartnerError(f"the offered file has {name} = {found!r:.40}")
        save_id = value.get("save_id")
        if not isinstance(save_id, str) or len(save_id) > 32 or set(save_id) - set("0123456789abcdef"):
            raise PartnerError(f"the offered file has save_id = {save_id!r:.40}")
        if not numbers["file"] < numbers["num_files"] <= 99999:  # type: ignore[operator]  # checked above
            raise PartnerError(f"file {numbers['file']} of {numbers['num_files']} was offered")
        created = value.get("created_unix_s")
        if not isinstance(created, float) or not 0 <= created < 1e12:
            raise PartnerError(f"the offered file has created_unix_s = {created!r:.40}")
        return cls(save_id=save_id, created_unix_s=created, **numbers)  # type: ignore[arg-type]  # checked above


class Shelf(Protocol):
    """Storage of a server. `place(offer)` returns the path to write to, in an existing folder. `keep(offer, path,
    digest)` is called when the file is complete and on disk, and makes it valid.

    Both may raise CheckpointError or OSError, which is reported to the sender.
    """

    def place(self, offer: Offer) -> Path: ...

    def keep(self, offer: Offer, path: Path, digest: str) -> None: ...


@final
class PartnerServer:
    """Receives files from the leader of another node, in separate threads, until `close`.

    address: where the others connect. token: secret shared by the run's leaders. timeout_s: longest time without data
    on a connection. A connection that does not authenticate is closed after HANDSHAKE_WITHIN_S, or sooner if
    _MAX_UNPROVEN newer ones exist, so that unknown clients cannot lock out the partner. Uses 1 MiB of memory per
    authenticated connection. Raises CheckpointError if it cannot listen.
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
        """Serves one connection until it ends. Errors are sent to the other side, which reports them to the user."""
        try:
            accept(connection, node=self._node, token=self._token, timeout_s=self._timeout_s)
            with self._lock:
                self._unproven.pop(connection, None)
            try:
                self._take(connection)
            except (OSError, HpctrainError) as error:
                reason = describe_failure(error, timeout_s=self._timeout_s)
                send_message(connection, {"error": f"{reason}"[:2000]})
                discard(connection, within_s=_DISCARD_S)
        except (OSError, HpctrainError):
            pass  # not authenticated, or the connection is lost: no one to report to
        finally:
            close(connection)
            with self._lock:
                self._connections.discard(connection)
                self._unproven.pop(connection, None)

    def _take(self, connection: socket.socket) -> None:
        request = receive_message(connection)
        if request.get("hello"):
            send_message(connection, {"done": True})
            return
        offer = Offer.from_json(request)
        path = self._shelf.place(offer)
        _check_space(path.parent, num_bytes=offer.num_bytes)
        with NewFile(path) as copy:
            send_message(connection, {"go": True})
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
        send_message(connection, {"done": True})


def _check_space(directory: Path, *, num_bytes: int) -> None:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < num_bytes + _KEPT_FREE_BYTES:
        raise CheckpointError(f"{directory} has {free} bytes free, the copy needs {num_bytes}")


def greet(partner: PartnerAddress, *, token: bytes, within_s: float = GREET_WITHIN_S) -> PartnerAddress:
    """Connects to the partner to check that it answers. Returns its address reduced to the one that did. Raises
    PartnerError."""
    connection = connect(partner, token=token, timeout_s=within_s, within_s=within_s)
    try:
        send_message(connection, {"hello": True})
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
    """Sends the file that `offer` describes. Returns when the partner has verified its hash and flushed it to disk.

    timeout_s: longest time without an answer. on_bytes: called with the length of each piece; may raise to stop.
    Raises PartnerError with the partner's name, the bytes sent and the error that the partner reported, and
    CheckpointError if `path` cannot be read. Uses 1 MiB of memory.
    """
    begin_s = time.perf_counter()
    connection = connect(partner, token=token, timeout_s=timeout_s, within_s=CONNECT_WITHIN_S)
    digest, sent = xxhash.xxh3_64(), 0
    try:
        send_message(connection, offer.to_json())
        _expect(connection, "go")
        try:
            for piece in pieces_of(path, chunk_bytes=_CHUNK_BYTES):
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
    answer = receive_message(connection)
    if "error" in answer:
        raise PartnerError(f"it reports: {answer['error']!s:.2000}")
    if answer.get(word) is not True:
        raise PartnerError(f"unexpected answer {answer!r:.200}")
