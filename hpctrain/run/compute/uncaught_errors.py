"""Ends all ranks when one rank does not catch an error or exits with an error code."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from hpctrain.comm import World, end_all_on_error
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.launch import print_and_exit
from hpctrain.resilience import shortage

P = ParamSpec("P")
T = TypeVar("T")


class UncaughtErrors:
    """Ends all ranks of a session after an error. `close` closes the session, and is collective."""

    def __init__(self, world: World, *, close: Callable[[], object]) -> None:
        self._world = world
        self._close = close
        self._hook_before: Callable[..., object] | None = None

    def watch(self) -> None:
        """Makes an uncaught error, or an exit with another code than 0, end all ranks instead of only this rank."""
        self._hook_before = sys.excepthook
        if self._world.num_ranks == 1:
            print_uncaught()
            return
        sys.excepthook = self._uncaught
        # Extension modules report an error that they ignore (of a destructor, in Cython) to the hook, too. Many do so
        # while Python ends, after `atexit`: a parallel HDF5 file that is still open, for example.
        atexit.register(self._restore_hook)
        who = f"hpctrain: rank {self._world.rank} on {socket.gethostname()}: the program has exited with code"
        end_all_on_error(
            f"{who} %d while its session was open; all ranks end with that code, so that no other rank waits for this "
            "one\n",
            waiting=f"{who} 0 while its session was open, and waits for the other ranks to end, too. One that needs "
            "this rank ends the run with code 6 at its time limit: leave together, or close the session on all "
            "ranks\n",
        )

    def release(self) -> None:
        """Restores the behaviour before `watch`: an uncaught error or an exit ends only this rank."""
        if self._hook_before is not None:
            self._restore_hook()
            atexit.unregister(self._restore_hook)
            end_all_on_error(None)

    def end_all(self, error: BaseException) -> None:
        """Ends all ranks because of `error`. Returns only if there is one rank."""
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

    def _restore_hook(self) -> None:
        if self._hook_before is not None:
            sys.excepthook = self._hook_before

    def _uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            self.end_all(error)
        except SystemExit as leave:
            _leave(leave)  # `atexit` has nothing to do once communication is closed


def uncaught_as_message(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function so that its uncaught HpctrainErrors end the program as `hpctrain` commands end.

    The program prints the message without a traceback, and exits with the exit code of the error.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except HpctrainError:
            print_uncaught()
            raise

    return call


def print_uncaught() -> None:
    """Prints any uncaught HpctrainError of this program as a message, without a traceback.

    Does nothing in an interactive interpreter, which continues after an error.
    """
    before = sys.excepthook
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not isinstance(error, HpctrainError):
            before(kind, error, where)
            return
        try:
            print_and_exit(error)
        except SystemExit as leave:
            _leave(leave)

    sys.excepthook = hook


def _leave(leave: SystemExit) -> NoReturn:
    """Exits with the exit code of `leave`.

    An exception hook, which calls this function, cannot set the exit code in another way.
    """
    sys.stdout.flush()
    os._exit(_kept(leave.code))


def _kept(code: object) -> int:
    """Returns the exit code that the system keeps of `SystemExit(code)`: the lowest 8 bits.

    If these bits are 0 although `code` is not 0, the result is 1, so that an error does not look like success.
    """
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF or int(code != 0)


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, HpctrainError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return _kept(error.code)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1 if shortage(error) is None else ExitCode.OUT_OF_MEMORY
