"""A server: a thread that adds the gradients of all ranks, steps the optimizer, and publishes the parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import RemoteMemory
from hpctrain.distributed import flat_view
from hpctrain.reduce.contract.bucket_reducer import Backoff
from hpctrain.reduce.parameter_server.server_memory import (
    BEGUN,
    PUBLISHED,
    WORD_BYTES,
    ServerMemory,
    flags_of,
    words_of,
)
from hpctrain.reduce.zero.bucket_division import ParameterSpan
from hpctrain.reduce.zero.owned_parts import OwnedParts

# Called with the number of an update before the server makes it; may set the optimizer's learning rate.
BeforeUpdate = Callable[[int], object]


@dataclass(slots=True)
class GradientSum:
    """The gradients of one clock that have arrived: sums for each bucket, and how many parts they are from.

    sums: shape (share.numel,) for each bucket; unspecified while `num_added` is 0.
    num_added: number of parts whose gradients were added. num_arrived: the same with parts that were left out.
    used: for each parameter, whether any part had a gradient of it.
    """

    sums: Sequence[torch.Tensor]
    used: NDArray[np.bool_]
    num_added: int = 0
    num_arrived: int = 0


@final
class ShardServer:
    """Serves one share of the parameters from a thread of its own.

    Gradients of one clock (one global batch) arrive in parts, one from each worker or several from a fast one. When all
    parts of the next clock have arrived, the server steps the optimizer with their sum, and publishes the parameters as
    the next version: version v contains the updates of the clocks before v, and no others.

    With `staleness` 0, parts are added in their order, so that sums have the same bits in every run. Otherwise they are
    added as they arrive. With "any", parts of different clocks are added up, and the server steps after each
    `num_workers` parts.

    A part with gradients that are not finite is left out. A clock without any gradient makes a version without a step.

    Args:
        memory: The memory of all servers. The thread only uses `local` and `sync`.
        layout: The layout of this server's memory.
        owned: This server's parts of the parameters.
        parameters: The trained parameters of the model, from which `begin` takes the values.
        spans: For each bucket, the runs of elements that this server holds.
        staleness: See `Ssp`.
        longest_wait_s: Longest pause between two looks at the messages.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        *,
        layout: ServerMemory,
        owned: OwnedParts,
        parameters: Sequence[torch.nn.Parameter],
        spans: Sequence[Sequence[ParameterSpan]],
        staleness: int | str,
        longest_wait_s: float,
    ) -> None:
        self.error: BaseException | None = None
        self.before_update: BeforeUpdate | None = None
        self._memory = memory
        self._owned = owned
        self._parameters = parameters
        self._spans = spans
        self._in_order = staleness == 0
        self._by_clock = staleness != "any"
        self._num_workers = layout.num_workers
        self._longest_wait_s = longest_wait_s
        local = memory.local
        self._words = words_of(local, count=layout.num_bytes // WORD_BYTES)
        self._taken = self._words[layout.taken(0) // WORD_BYTES :][: layout.num_workers]
        self._left = np.array([layout.left_at(w) // WORD_BYTES for w in range(layout.num_workers)])
        self._messages = []
        for worker in range(layout.num_workers):
            message = local[layout.message_at(worker) :][: layout.message.num_bytes]
            flags = flags_of(message, num_parameters=layout.num_parameters)
            self._messages.append((words_of(message, count=2), flags, layout.message.views(message)))
        copies = [local[layout.copy_at(version) :][: layout.copy.num_bytes] for version in (0, 1)]
        self._stamps = [words_of(copy, count=1 + layout.num_workers) for copy in copies]
        self._copies = [layout.copy.views(copy) for copy in copies]
        self._behind = np.zeros(layout.num_workers, dtype=np.int64)
        self._by_clock_sums: dict[int, GradientSum] = {}
        self._free: list[GradientSum] = []
        self.version = 0
        self._next_part = 0
        self._serving = threading.Lock()
        self._over = threading.Event()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="hpctrain-server", daemon=True)

    def begin(self, version: int) -> None:
        """Takes the values of the model's parameters as `version`, drops gradients, and starts the thread.

        Call it while no rank reads or writes.
        """
        with self._serving:
            for of_bucket in self._spans:
                for span in of_bucket:
                    whole = flat_view(self._parameters[span.parameter])
                    part = self._owned.parts[span.parameter].detach()
                    part.view(-1).copy_(whole[span.begin : span.begin + span.numel])
            self._free += self._by_clock_sums.values()
            self._by_clock_sums.clear()
            self._next_part = version * self._num_workers
            self._behind[:] = self._next_part
            self._publish(version)
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # a new thread has PyTorch's default
        backoff = Backoff(longest_wait_s=self._longest_wait_s)
        try:
            while not self._over.is_set():
                self._memory.sync()
                with self._serving:
                    progressed = self._take_messages()
                if progressed:
                    backoff.reset()
                else:
                    backoff.wait(self._over.wait, eager=False)
        except BaseException as error:
            self.error = error

    def _take_messages(self) -> bool:
        fresh = np.flatnonzero(self._words[self._left] != self._taken)
        if not len(fresh):
            return False
        self._memory.sync()
        parts = {int(self._messages[worker][0][0]): int(worker) for worker in fresh}
        progressed = False
        for part in sorted(parts):
            if self._in_order and part != self._next_part:
                break
            self._take(parts[part], part)
            progressed = True
            self._update_if_complete()
        return progressed

    def _take(self, worker: int, part: int) -> None:
        words, flags, gradients = self._messages[worker]
        clock = part // self._num_workers if self._by_clock else self.version
        found = self._by_clock_sums.get(clock)
        if found is None:
            found = self._by_clock_sums[clock] = self._free.pop() if self._free else self._new_sum(len(flags))
            found.num_added = found.num_arrived = 0
            found.used[:] = False
        if words[1]:
            for total, gradient in zip(found.sums, gradients, strict=True):
                # A copy: zero plus a negative zero would have another sign.
                total.copy_(gradient) if not found.num_added else total.add_(gradient)
            found.num_added += 1
            found.used |= flags.astype(np.bool_)
        found.num_arrived += 1
        self._next_part = part + 1
        self._behind[worker] = part + 1
        self._memory.sync()
        self._taken[worker] = self._words[self._left[worker]]

    def _new_sum(self, num_parameters: int) -> GradientSum:
        sums = [torch.zeros_like(own) for own in self._owned.gradients]
        return GradientSum(sums, np.zeros(num_parameters, dtype=np.bool_))

    def _update_if_complete(self) -> None:
        found = self._by_clock_sums.get(self.version)
        while found is not None and found.num_arrived >= self._num_workers:
            del self._by_clock_sums[self.version]
            if self.before_update is not None:
                self.before_update(self.version)
            if found.num_added:
                for own, total in zip(self._owned.gradients, found.sums, strict=True):
                    own.copy_(total)
                self._owned.set_gradients(found.used.tolist())
                self._owned.step(1.0)
                self._owned.forget()
            self._free.append(found)
            self._publish(self.version + 1)
            found = self._by_clock_sums.get(self.version)

    def _publish(self, version: int) -> None:
        """Writes a version into the copy that the newest version is not in.

        A reader of an older version sees from `BEGUN` that its copy may be overwritten.
        """
        self._words[BEGUN // WORD_BYTES] = version
        self._memory.sync()
        copy = self._copies[version % 2]
        for values, of_bucket in zip(copy, self._spans, strict=True):
            for span in of_bucket:
                part = self._owned.parts[span.parameter].detach()
                values[span.place : span.place + span.numel].copy_(part.view(-1))
        stamp = self._stamps[version % 2]
        stamp[0], stamp[1:] = version, self._behind
        self._memory.sync()
        self.version = version
        self._words[PUBLISHED // WORD_BYTES] = version
        self._memory.sync()
