"""Ranks as forked processes joined by sockets: one can be killed at a random moment, and a trial takes
milliseconds, where a job under mpirun takes seconds to start. What the communicator does is correct and slow."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.interface.communicator import Attributes, ReduceOp
from hpctrain.errors import CommunicationError, HpctrainError


class SocketWorld(Attributes):
    """One rank's end: a socket to each of the others."""

    backend = "sockets"

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.num_ranks = len(sockets) + 1
        self.members = tuple(range(self.num_ranks))
        self._sockets = sockets

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        found = []
        for other in self.members:
            if other == self.rank:
                found.append(bytes(data))
                continue
            try:
                # The lower rank speaks first, and all meet the others in the same order: nobody waits in a ring.
                if self.rank < other:
                    self._send(other, data)
                found.append(self._receive(other))
                if self.rank > other:
                    self._send(other, data)
            except OSError as error:
                raise CommunicationError(f"rank {other} has left: {error}") from error
        return found

    def _send(self, other: int, data: bytes) -> None:
        self._sockets[other].sendall(struct.pack("<q", len(data)) + data)

    def _receive(self, other: int) -> bytes:
        (length,) = struct.unpack("<q", self._exactly(other, 8))
        return self._exactly(other, length)

    def _exactly(self, other: int, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            part = self._sockets[other].recv(min(num_bytes, 1 << 20))
            if not part:
                raise ConnectionResetError("end of its socket")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def barrier(self) -> None:
        self.all_gather_bytes(b"")

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        mine = buffer.numpy().tobytes() if self.rank == root else b""
        data = self.all_gather_bytes(mine)[root]
        if self.rank != root and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=buffer.dtype))

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        parts = self.all_gather_bytes(buffer.numpy().tobytes())
        stacked = torch.stack([torch.frombuffer(bytearray(part), dtype=buffer.dtype) for part in parts])
        buffer.copy_(stacked.sum(0).to(buffer.dtype) if op is ReduceOp.SUM else stacked.max(0).values)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts = self.all_gather_bytes(part.numpy().tobytes())
        whole = torch.cat([torch.frombuffer(bytearray(p), dtype=part.dtype) for p in parts if p] or [part])
        return whole if out is None else out.copy_(whole)

    def split(self, groups: Sequence[Sequence[int]]) -> SocketWorld | None:
        """Groups of one, and the group of all: of the others nothing here has need."""
        for group in groups:
            if self.rank in group:
                if len(group) == 1:
                    return SocketWorld(0, {})
                if tuple(group) == self.members:
                    return self
                raise NotImplementedError(f"a group of {list(group)}")
        return None

    def duplicate(self) -> SocketWorld:
        return self


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended. value: what its function returned, or the text of its error. code: of its exit, -9 for
    one that was killed."""

    value: Any
    code: int


class Ranks:
    """Started ranks: `pids[r]` is rank r's."""

    def __init__(self, pids: list[int], pipes: list[int]) -> None:
        self.pids = pids
        self._pipes = pipes
        self._begin_s = time.monotonic()

    def kill(self, which: Sequence[int]) -> None:
        for rank in which:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, *, timeout_s: float = 300) -> list[Ended]:
        """Wait for all of them. AssertionError, when they are killed, after `timeout_s` from their start."""
        texts = []
        late = []
        for rank, pipe in enumerate(self._pipes):
            text = b""
            while True:
                left_s = self._begin_s + timeout_s - time.monotonic()
                if not select.select([pipe], [], [], max(0.0, left_s))[0]:
                    late.append(rank)
                    self.kill([rank])
                    left_s = 5
                part = os.read(pipe, 1 << 16)
                if not part:
                    break
                text += part
            os.close(pipe)
            texts.append(text)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        assert not late, f"ranks {late} have not ended after {timeout_s:g} s"
        return [
            Ended(value=json.loads(text) if text else None, code=code)
            for text, code in zip(texts, codes, strict=True)
        ]


def start_ranks(num_ranks: int, function: Callable[[Any], Any]) -> Ranks:
    """Fork `num_ranks` processes that run `function(world)`; what it returns must be JSON.

    A rank leaves with the exit code of its error, and says on stderr what is no agreed error of all ranks.
    """
    pairs = {(a, b): socket.socketpair() for a in range(num_ranks) for b in range(a + 1, num_ranks)}
    pids: list[int] = []
    pipes: list[int] = []
    for rank in range(num_ranks):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            sockets = {}
            for (a, b), (first, second) in pairs.items():
                if a == rank:
                    sockets[b] = first
                else:
                    first.close()
                if b == rank:
                    sockets[a] = second
                else:
                    second.close()
            for pipe in (read_fd, *pipes):
                os.close(pipe)
            code = 1
            try:
                value = function(SocketWorld(rank, sockets))
                os.write(write_fd, json.dumps(value).encode())
                code = 0
            except HpctrainError as error:
                os.write(write_fd, json.dumps(f"{type(error).__name__}: {error}").encode())
                code = int(error.exit_code)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_fd)
        pids.append(pid)
        pipes.append(read_fd)
    for first, second in pairs.values():
        first.close()
        second.close()
    return Ranks(pids, pipes)


def in_a_fork(function: Callable[[], Any]) -> Any:
    """`function()` in a child, so that threads it starts are not there when this process forks again."""
    (ended,) = start_ranks(1, lambda world: function()).wait()
    assert ended.code == 0, f"exit code {ended.code}"
    return ended.value
