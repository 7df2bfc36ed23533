"""Exceptions that hpctrain raises for the user, and the exit codes of its commands.

The attribute `exit_code` of each class is the exit code of a command that ends with this error. A message states what
was asked, what was found, on which rank, and what to do.

An error with `agreed` = True is raised on every rank of the run (see `hpctrain.comm.collectives.agreement`), so all
ranks shut down normally. An error that is not agreed was raised on one rank only: the run must be aborted, because
the other ranks would wait for that rank forever.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the `hpctrain` commands, each with its meaning in a few words for `hpctrain --help`."""

    summary: str

    def __new__(cls, value: int, summary: str = "") -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.summary = summary
        return code

    DONE = 0, "done"
    USAGE = 2, "usage or recipe"
    DATA = 3, "data"
    CHECKPOINT = 4, "checkpoint"
    LAUNCH = 5, "launch or topology"
    COMMUNICATION = 6, "communication"
    DIVERGED = 7, "diverged"
    OUT_OF_MEMORY = 8, "out of memory"
    DIFFERS = 9, "check found a difference"
    # EX_TEMPFAIL of sysexits.h
    STOPPED_EARLY = 75, "stopped early with its state saved (run the same command again to resume)"
    GIVEN_UP = 76, "given up by supervise (do not queue the job again)"


class HpctrainError(Exception):
    """Base class of all errors that are meant for the user. Any other exception that escapes is a bug in hpctrain.

    Args:
        message: What was asked, what was found, on which rank, and what to do.
        agreed: True if every rank of the run raises this error, so that all ranks can shut down normally.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class UsageError(HpctrainError):
    """The command line or the arguments of a call are wrong, or ask for something that hpctrain does not support."""

    exit_code = ExitCode.USAGE


class GradientsInUse(UsageError):
    """A gradient was read or changed between backward and the step, while the ranks were still summing it."""


class BackwardRanTwice(UsageError):
    """A parameter got a second gradient in one step, although the ranks had already started to sum the first one."""


class RecipeError(UsageError):
    """The recipe has an unknown key, a value of the wrong type or out of range, or contradictory values."""


class DataError(HpctrainError):
    """A dataset is missing, incomplete or damaged, or does not match what the run needs."""

    exit_code = ExitCode.DATA


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written, found or verified, or belongs to another model."""

    exit_code = ExitCode.CHECKPOINT


class RanksDiffer(HpctrainError):
    """Ranks that train one model hold different parameters or different optimizer settings."""

    exit_code = ExitCode.CHECKPOINT


class LaunchError(HpctrainError):
    """The launcher, the environment and MPI disagree about the ranks, or a resource is missing at the start."""

    exit_code = ExitCode.LAUNCH


class TopologyError(LaunchError):
    """The number of ranks, or their placement on the nodes, is not what was requested."""


class CommunicationError(HpctrainError):
    """A collective operation failed, timed out, or was called differently by different ranks."""

    exit_code = ExitCode.COMMUNICATION


class BufferMismatch(CommunicationError):
    """Ranks called one collective operation with buffers of different lengths or dtypes."""


class DivergedError(HpctrainError):
    """The run has diverged and cannot be rolled back.

    In too many steps, the loss or the gradients were not finite, or the loss jumped.
    """

    exit_code = ExitCode.DIVERGED

    def __init__(self, message: str, *, agreed: bool = False, reason: str = "") -> None:
        """Creates the error; `reason` is the part of the message that says what was observed."""
        super().__init__(message, agreed=agreed)
        self.reason = reason


class OutOfMemory(HpctrainError):
    """A rank or its device has run out of memory, and smaller micro-batches do not help."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DifferenceFound(HpctrainError):
    """`hpctrain check` found that repeated trainings give different results, and has printed the causes."""

    exit_code = ExitCode.DIFFERS


class StoppedEarly(HpctrainError):
    """The run was asked to stop. The state of the run is saved, and the same command resumes the run."""

    exit_code = ExitCode.STOPPED_EARLY


class GivenUp(HpctrainError):
    """The supervisor does not restart the run, because the run would fail again: a person must find the cause."""

    exit_code = ExitCode.GIVEN_UP


def from_exit_code(exit_code: int) -> type[HpctrainError]:
    """Returns the exception class for an exit code, so that one rank's error can be raised on the other ranks.

    Args:
        exit_code: Exit code of an `hpctrain` command, or the exit code that another rank has sent.

    Returns:
        The class with this exit code; `HpctrainError` if no class has it. If several classes have this exit code, the
        class that is defined first.
    """
    classes = HpctrainError.__subclasses__()  # in the order of their definition
    return next((found for found in classes if found.exit_code == exit_code), HpctrainError)
