"""The exception tree. Each class carries the exit code with which a command ends because of it.

An error says what was asked, what was found, on which rank, and what to do. `agreed` is true once every
rank of the run has been told of the error (see `hpctrain.comm.collectives.agreement`): then all ranks leave by the same
door. An error that is not agreed was met by one rank alone, and the run must be aborted so that no other
rank waits for it for ever.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a finished `hpctrain` command tells the shell, the launcher and Slurm."""

    DONE = 0
    USAGE = 2
    DATA = 3
    CHECKPOINT = 4
    LAUNCH = 5
    COMMUNICATION = 6
    DIVERGED = 7
    STOPPED_EARLY = 75  # EX_TEMPFAIL: run it again and it goes on from where it stopped


class HpctrainError(Exception):
    """Base of every error that is meant for the user. Anything else that escapes is a bug of ours."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class UsageError(HpctrainError):
    """The command line or the call cannot be carried out as asked."""

    exit_code = ExitCode.USAGE


class RecipeError(UsageError):
    """The recipe has an unknown key, a wrong type, a value out of range, or values that do not fit together."""


class DataError(HpctrainError):
    """A dataset is missing, incomplete, damaged, or does not fit what the run asks of it."""

    exit_code = ExitCode.DATA


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written, found, verified, or does not belong to this model."""

    exit_code = ExitCode.CHECKPOINT


class LaunchError(HpctrainError):
    """The launcher, the environment and MPI disagree, or what the run needs at start is not there."""

    exit_code = ExitCode.LAUNCH


class TopologyError(LaunchError):
    """The number or placement of the ranks is not what the run asks for."""


class CommunicationError(HpctrainError):
    """A collective operation failed, timed out, or was called differently by different ranks."""

    exit_code = ExitCode.COMMUNICATION


class BufferMismatch(CommunicationError):
    """Ranks called one collective with buffers of different length or dtype."""


class DivergedError(HpctrainError):
    """The loss or the gradients stopped being finite, and the agreed limit of skipped steps is used up."""

    exit_code = ExitCode.DIVERGED


class StoppedEarly(HpctrainError):
    """The run was asked to stop; its state is saved, and it resumes from there."""

    exit_code = ExitCode.STOPPED_EARLY


def from_exit_code(exit_code: int) -> type[HpctrainError]:
    """The class that stands for an exit code: how an error met on one rank is raised again on the others."""
    by_code: dict[int, type[HpctrainError]] = {
        ExitCode.USAGE: UsageError,
        ExitCode.DATA: DataError,
        ExitCode.CHECKPOINT: CheckpointError,
        ExitCode.LAUNCH: LaunchError,
        ExitCode.COMMUNICATION: CommunicationError,
        ExitCode.DIVERGED: DivergedError,
        ExitCode.STOPPED_EARLY: StoppedEarly,
    }
    return by_code.get(exit_code, HpctrainError)
