"""An error that a program does not catch on one rank ends all ranks."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from hpctrain.comm import World
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.resilience import shortage


class UncaughtErrors:
    """Ends all ranks of a session because of an error. close: closes the session; collective."""

    def __init__(self, world: World, *, close: Callable[[], object]) -> None:
        self._world = world
        self._close = close
        self._hook_before: Callable[..., object] | None = None

    def watch(self) -> None:
        """Makes an uncaught error end all ranks, not only this one."""
        if self._world.num_ranks > 1:
            self._hook_before = sys.excepthook
            sys.excepthook = self._uncaught

    def release(self) -> None:
        """Undoes `watch`."""
        if self._hook_before is not None:
            sys.excepthook = self._hook_before

    def end_all(self, error: BaseException) -> None:
        """Ends this rank and all others because of `error`. Returns only if there are no others."""
        rank = self._world.rank
        if self._world.num_ranks == 1:
            return
        if isinstance(error, HpctrainError) and error.agreed:
            if rank == 0:
                print(f"hpctrain: {error}", file=sys.stderr, flush=True)
            # The launcher ends all ranks when the first exits with an error: wait until rank 0 has printed it.
            self._world.barrier()
            self._close()
            raise SystemExit(int(error.exit_code)) from error
        code = _exit_code_of(error)
        lines = [str(error)] if isinstance(error, HpctrainError) else traceback.format_exception(error)
        print(
            f"hpctrain: rank {rank} on {socket.gethostname()}: {''.join(lines).rstrip()}\n"
            f"hpctrain: rank {rank} ends the run (exit code {code}), so that no other rank waits for it",
            file=sys.stderr,
            flush=True,
        )
        self._world.abort(code)

    def _uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            self.end_all(error)
        except SystemExit as leave:
            # A hook cannot choose the exit code; atexit has nothing left to do once communication is closed.
            sys.stdout.flush()
            os._exit(leave.code if isinstance(leave.code, int) else 1)


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, HpctrainError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1 if shortage(error) is None else ExitCode.OUT_OF_MEMORY
