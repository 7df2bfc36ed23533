"""The signals that may ask a run to stop or to save, and how they are held back while a rank starts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any, Literal, final, get_args

from hpctrain.errors import ExitCode

# Signals that batch systems and users send. Grid Engine and LSF can be configured to send SIGQUIT and SIGXCPU.
SignalName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU"]
SIGNAL_NAMES: tuple[SignalName, ...] = get_args(SignalName)

# SIGTERM: Slurm's preemption and scancel. SIGUSR1: `sbatch --signal=USR1@120`, and `hpctrain launch` through
# mpirun. SIGINT: Ctrl-C on a run of one rank. SIGHUP: the terminal was closed.
DEFAULT_STOP_SIGNALS: tuple[SignalName, ...] = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")

_kept_from_children: set[signal.Signals] = set()


def hold_signals() -> None:
    """Blocks all signals that the recipe may configure. `release_signals` delivers signals that arrive meanwhile.

    The recipe states the signals to handle, and is read only after torch is loaded, which takes seconds. Until then, a
    signal that is not blocked would end the rank. The block survives the exec of `restart_with_sleep`. Call it in the
    main thread, before other threads exist.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _all())


def let_interrupts_end() -> None:
    """Lets Ctrl-C end this process at once, until the run's handler is installed. For a rank without a launcher.

    There is nothing to save yet, and the run would otherwise stop only after its first step. Do not call this under a
    launcher: a launcher does not pass Ctrl-C to its ranks, so a SIGINT that a rank receives was sent to stop the run.
    An ignored SIGINT stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def let_stop_end(name: str, *, says: bool) -> None:
    """Lets the signal `name` end this process at once with code 75, until `release_signals` is called.

    Call it on a rank of `hpctrain launch`, which ends all ranks when one rank has left: nothing has been trained yet,
    and loading the libraries may take long.

    says: True if this rank prints that it was stopped.
    """
    signal.signal(signal.Signals[name], _Leave(says=says))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.Signals[name]])


class _Leave:
    """Signal handler that ends this process."""

    def __init__(self, *, says: bool) -> None:
        self._says = says

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._says:
            name = signal.Signals(number).name
            text = f"stopped while the ranks started ({name}): nothing was trained"
            os.write(2, f"hpctrain: {text}; run the same command again\n".encode())
        os._exit(int(ExitCode.STOPPED_EARLY))


def release_signals() -> None:
    """Delivers the signals held back by `hold_signals`, or by a launcher (`env --block-signal`).

    Also undoes `let_stop_end`, if no other handler has been installed since.
    """
    for number in _all():
        if isinstance(signal.getsignal(number), _Leave):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_all()) - _kept_from_children)


def keep_from_children(numbers: Iterable[signal.Signals]) -> None:
    """Keeps stop signals from child processes: blocks `numbers` except SIGTERM in this thread.

    Signals that the previous call blocked are unblocked, unless `numbers` contains them. Threads that were started
    before still receive the signals.

    mpirun, srun and terminals send a stop signal also to processes that a rank has started. The signal would end
    workers of torch's DataLoader before the rank has saved. A new process inherits the mask of the thread that starts
    the process, by fork or as another program. SIGTERM is not blocked, because it is used to end such workers.
    """
    before = set(_kept_from_children)
    _kept_from_children.clear()
    _kept_from_children.update(number for number in numbers if number != signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before - _kept_from_children)
    signal.pthread_sigmask(signal.SIG_BLOCK, _kept_from_children)


def ignore_signals(names: Iterable[SignalName]) -> None:
    """Ignores signals from now on. For a process that is about to end.

    The interpreter restores the default action of handled signals before it has ended, so that a late signal would
    kill the rank.
    """
    for name in names:
        signal.signal(signal.Signals[name], signal.SIG_IGN)


def _all() -> list[signal.Signals]:
    return [signal.Signals[name] for name in SIGNAL_NAMES]


# Slurm sends it by `scancel --signal=USR2`; mpirun, srun and `hpctrain launch` pass it on to every rank.
DEFAULT_SAVE_SIGNAL: SignalName = "SIGUSR2"


@final
class CheckpointSignal:
    """Records when this rank received the signal `name`, which asks the run for a checkpoint.

    The ranks agree on the step at which they save, as they do for a stop.
    """

    def __init__(self, name: SignalName = DEFAULT_SAVE_SIGNAL) -> None:
        self._signal = signal.Signals[name]
        self._previous: Any = None
        self._installed = False
        self.received_s: float | None = None  # on the monotonic clock

    def install(self) -> CheckpointSignal:
        """Installs the handler and returns self. Does nothing outside the main thread (ranks as threads)."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(self._signal) is not signal.SIG_IGN:
            self._previous = signal.signal(self._signal, self._handle)
            self._installed = True
        return self

    def restore(self) -> None:
        if self._installed:
            signal.signal(self._signal, self._previous)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received_s = time.monotonic()
