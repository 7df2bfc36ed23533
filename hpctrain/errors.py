"""Exception classes. Each class has the exit code of a command that ends with this error.

A message states what was asked, what was found, on which rank, and what to do. `agreed` is true if every rank of the
run raises the same error (see `hpctrain.comm.collectives.agreement`): then all ranks shut down normally. An error that
is not agreed was raised on one rank only, and the run must be aborted, because the other ranks would wait for that
rank forever.
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
    """Base of all errors that are meant for the user. Any other exception that escapes is a bug in hpctrain."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class UsageError(HpctrainError):
    """The command line or the call cannot be carried out as asked."""

    exit_code = ExitCode.USAGE


class GradientsInUse(UsageError):
    """A gradient was read or changed between backward and the step, while the ranks sum it."""


class BackwardRanTwice(UsageError):
    """A parameter got a second gradient in a step, although the ranks sum the first one already."""


class RecipeError(UsageError):
    """The recipe has an unknown key, a wrong type, a value out of range, or values that do not fit together."""


class DataError(HpctrainError):
    """A dataset is missing, incomplete, damaged, or does not match what the run needs."""

    exit_code = ExitCode.DATA


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written, found or verified, or does not belong to this model."""

    exit_code = ExitCode.CHECKPOINT


class RanksDiffer(HpctrainError):
    """Ranks that train one model hold different parameters, or settings of the optimizer."""

    exit_code = ExitCode.CHECKPOINT


class LaunchError(HpctrainError):
    """The launcher, the environment and MPI disagree, or a resource that the run needs at start is missing."""

    exit_code = ExitCode.LAUNCH


class TopologyError(LaunchError):
    """The number or placement of the ranks is not the requested one."""


class CommunicationError(HpctrainError):
    """A collective operation failed, timed out, or was called differently by different ranks."""

    exit_code = ExitCode.COMMUNICATION


class BufferMismatch(CommunicationError):
    """Ranks called one collective with buffers of different length or dtype."""


class DivergedError(HpctrainError):
    """Loss or gradients are not finite, or the loss jumped, for too many steps, and no roll-back is possible."""

    exit_code = ExitCode.DIVERGED

    def __init__(self, message: str, *, agreed: bool = False, reason: str = "") -> None:
        """reason: the part of the message that says what was seen."""
        super().__init__(message, agreed=agreed)
        self.reason = reason


class OutOfMemory(HpctrainError):
    """Memory of a rank or its device is used up, and smaller micro-batches do not help."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DifferenceFound(HpctrainError):
    """`hpctrain check` found that a training differs from itself; its causes are printed."""

    exit_code = ExitCode.DIFFERS


class StoppedEarly(HpctrainError):
    """The run was asked to stop; its state is saved, and it resumes from there."""

    exit_code = ExitCode.STOPPED_EARLY


class GivenUp(HpctrainError):
    """Starting the run again would not help: a person must find out why it fails."""

    exit_code = ExitCode.GIVEN_UP


def from_exit_code(exit_code: int) -> type[HpctrainError]:
    """Returns the exception class for `exit_code`, used to raise one rank's error on the others.

    Of several classes with this code, the one that is defined first. HpctrainError if no class has it.
    """
    classes = HpctrainError.__subclasses__()  # in the order of their definition
    return next((found for found in classes if found.exit_code == exit_code), HpctrainError)
