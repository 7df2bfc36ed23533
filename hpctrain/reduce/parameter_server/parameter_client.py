"""A rank's side of a parameter server: it takes parts of the common order, reads parameters, and leaves gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import RemoteMemory
from hpctrain.distributed import flat_view, memory_order
from hpctrain.reduce.contract.bucket_reducer import Backoff
from hpctrain.reduce.parameter_server.server_memory import (
    BEGUN,
    COUNTER,
    ServerMemory,
    flags_of,
    words_of,
)
from hpctrain.reduce.zero.bucket_division import ParameterSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPart:
    """One part of a global batch, which this rank has taken from the common order.

    Attributes:
        clock: Number of the global batch, which is the number of the update to which the gradients belong.
        index: Index of the part in the global batch, from 0 to the number of workers - 1.
    """

    clock: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRead:
    """The parameters that this rank has read for one part.

    Attributes:
        clock: Clock of the part.
        versions: For each server, the version of its share: the share contains the updates of all clocks below the
            version, of every rank, and no others.
    """

    clock: int
    versions: tuple[int, ...]

    @property
    def staleness(self) -> int:
        """How many updates of earlier clocks the oldest share lacks."""
        return self.clock - min(self.versions)


@dataclass(slots=True, kw_only=True)
class StalenessFigures:
    """What an `SspUpdater` has read and sent so far on this rank.

    Attributes:
        num_reads: Number of parts for which parameters were read.
        largest_staleness: Largest staleness of a read.
        num_repeated: Number of reads of a share that were repeated, since the share changed meanwhile.
        bytes_read: Bytes of parameters that this rank has read from servers, its own included.
        bytes_sent: Bytes of gradients that this rank has left on servers, its own included.
        waited_s: Seconds in which this rank waited for a version, or for a server to take its gradients.
    """

    num_reads: int = 0
    largest_staleness: int = 0
    num_repeated: int = 0
    bytes_read: int = 0
    bytes_sent: int = 0
    waited_s: float = 0.0


@final
class ParameterClient:
    """Reads parameters from all servers into the model, and leaves gradients there. Not collective.

    Args:
        memory: The memory of the servers.
        servers: World ranks of the servers.
        layouts: The layout of each server's memory.
        spans: For each server and bucket, the runs of elements that the server holds.
        parameters: The trained parameters of the model.
        worker: Index of this rank among the ranks that train; None if this rank only serves.
        check: Function that is called during waits; it may raise an error.
        longest_wait_s: Longest pause between two looks.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        *,
        servers: Sequence[int],
        layouts: Sequence[ServerMemory],
        spans: Sequence[Sequence[Sequence[ParameterSpan]]],
        parameters: Sequence[torch.nn.Parameter],
        worker: int | None,
        check: Callable[[], None],
        longest_wait_s: float,
    ) -> None:
        self._memory = memory
        self._servers = servers
        self._layouts = layouts
        self._spans = spans
        self._parameters = parameters
        self._worker = worker
        self._num_workers = layouts[0].num_workers
        self._check = check
        self._longest_wait_s = longest_wait_s
        self._copies = [np.zeros(layout.copy.num_bytes, dtype=np.uint8) for layout in layouts]
        self._messages = [np.zeros(layout.message.num_bytes, dtype=np.uint8) for layout in layouts]
        self._versions = [-1] * len(servers)
        self._num_left = 0
        self._until = 0
        self._waits_for, self._wait_place = "", 0
        self.figures = StalenessFigures()

    def forget(self) -> None:
        """Forgets which versions the model has, after the versions have begun anew."""
        self._versions = [-1] * len(self._servers)

    def take(self, *, until: int) -> OrderPart | None:
        """Takes the next part of the common order; None if it is of the clock `until` or a later one."""
        self._until = until
        number = self._memory.fetch_add(self._servers[0], offset=COUNTER, value=1)
        clock, index = divmod(number, self._num_workers)
        self._memory.progressed(place=min(clock, until))
        return OrderPart(clock=clock, index=index) if clock < until else None

    def read(self, *, at_least: int, clock: int) -> ParameterRead:
        """Reads the newest version of each share into the model, once all are `at_least` or newer.

        clock: clock of the part for which the parameters are read.
        """
        newest = self._look()
        if (newest[:, 1] < at_least).any():
            newest = self._await_versions(at_least, clock=clock)
        pending = [n for n in range(len(self._servers)) if newest[n, 1] != self._versions[n]]
        while pending:
            wanted = newest[:, 1].tolist()
            for number in pending:
                copy, layout = self._copies[number], self._layouts[number]
                self._memory.get(self._servers[number], offset=layout.copy_at(wanted[number]), out=copy)
                self.figures.bytes_read += len(copy)
            self._memory.flush()
            newest = self._look()
            again = []
            for number in pending:
                # The copy was not being overwritten, unless the version after the next one had begun.
                if newest[number, 0] > wanted[number] + 1:
                    self.figures.num_repeated += 1
                    again.append(number)
                    continue
                version = int(words_of(self._copies[number], count=1)[0])
                assert version == wanted[number], f"server {number}: stamp {version}, not {wanted[number]}"
                self._versions[number] = version
                self._put_into_model(number)
            pending = again
        return ParameterRead(clock=clock, versions=tuple(self._versions))

    def leave(
        self, part: OrderPart, gradients: Sequence[torch.Tensor | None], *, finite: bool, factor: float
    ) -> None:
        """Writes gradients into this rank's slot on each server.

        gradients: for each parameter its gradient, or None. finite: False if the servers are to leave them out.
        factor: factor for all gradients.
        """
        assert self._worker is not None
        worker = self._worker
        flat = [
            None if g is None else _in_memory_order(g, parameter)
            for g, parameter in zip(gradients, self._parameters, strict=True)
        ]
        for message, layout, of_server in zip(self._messages, self._layouts, self._spans, strict=True):
            words_of(message, count=2)[:] = part.clock * self._num_workers + part.index, finite
            flags_of(message, num_parameters=len(flat))[:] = [g is not None for g in flat]
            if finite:
                _pack(flat, of_server, into=layout.message.views(message), factor=factor)
        self._await_taken(part.clock)
        for message, layout, rank in zip(self._messages, self._layouts, self._servers, strict=True):
            self._memory.put(rank, offset=layout.message_at(worker), data=message)
            self.figures.bytes_sent += len(message)
        self._memory.complete()
        self._num_left += 1
        for layout, rank in zip(self._layouts, self._servers, strict=True):
            self._memory.store(rank, offset=layout.left_at(worker), value=self._num_left)
        self._memory.complete()

    def _look(self) -> NDArray[np.int64]:
        """Returns the begun and the newest version of each server, shape (number of servers, 2)."""
        found = np.zeros((len(self._servers), 2), dtype=np.int64)
        for number, rank in enumerate(self._servers):
            self._memory.get(rank, offset=BEGUN, out=found[number].view(np.uint8))
        self._memory.flush()
        return found

    def _await_versions(self, at_least: int, *, clock: int) -> NDArray[np.int64]:
        newest = self._look()

        def done() -> bool:
            nonlocal newest
            before, newest = newest, self._look()
            if (before[:, 1] != newest[:, 1]).any():
                self._memory.progressed(place=clock)
            oldest = int(newest[:, 1].argmin())
            # Ranks that still compute for the clock of the missing update have a lower number than this.
            self._wait_place = int(newest[oldest, 1]) + 1
            self._waits_for = (
                f"for update {newest[oldest, 1]} of the parameters that rank {self._servers[oldest]} serves, to begin "
                f"step {clock}"
            )
            return bool((newest[:, 1] >= at_least).all())

        self._wait(done, clock=clock)
        return newest

    def _wait(self, done: Callable[[], bool], *, clock: int) -> None:
        """Calls `done` until it returns True. `done` sets what this rank waits for."""
        began = time.perf_counter()
        backoff = Backoff(longest_wait_s=self._longest_wait_s)
        while not done():
            self._check()
            self._memory.waits(self._waits_for, place=self._wait_place)
            self._memory.sync()
            backoff.wait(eager=False)
        self._memory.progressed(place=clock)
        self.figures.waited_s += time.perf_counter() - began

    def _put_into_model(self, number: int) -> None:
        values = self._layouts[number].copy.views(self._copies[number])
        for of_bucket, spans in zip(values, self._spans[number], strict=True):
            for span in spans:
                whole = flat_view(self._parameters[span.parameter])
                whole[span.begin : span.begin + span.numel].copy_(
                    of_bucket[span.place : span.place + span.numel]
                )

    def _await_taken(self, clock: int) -> None:
        """Waits until every server has taken this rank's last message, whose slot is then free."""
        assert self._worker is not None
        taken = np.zeros((len(self._servers), 1), dtype=np.int64)

        def done() -> bool:
            for number, (rank, layout) in enumerate(zip(self._servers, self._layouts, strict=True)):
                self._memory.get(
                    rank, offset=layout.taken(self._worker or 0), out=taken[number].view(np.uint8)
                )
            self._memory.flush()
            late = np.flatnonzero(taken[:, 0] != self._num_left)
            if len(late):
                # The highest number, so that all ranks that do not wait count as late: that server is among them.
                self._wait_place = self._until
                self._waits_for = f"for rank {self._servers[late[0]]} to take the gradients of step {clock}"
            return not len(late)

        if not done():
            self._wait(done, clock=clock)


def _in_memory_order(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return dense.permute(memory_order(parameter)).reshape(-1)


def _pack(
    flat: Sequence[torch.Tensor | None],
    spans: Sequence[Sequence[ParameterSpan]],
    *,
    into: Sequence[torch.Tensor],
    factor: float,
) -> None:
    """Writes the elements of `spans`, times `factor`, into the shares of a message; zeros without a gradient."""
    for share, of_bucket in zip(into, spans, strict=True):
        for span in of_bucket:
            place, gradient = share[span.place : span.place + span.numel], flat[span.parameter]
            if gradient is None:
                place.zero_()
            else:
                torch.mul(gradient[span.begin : span.begin + span.numel], factor, out=place)
