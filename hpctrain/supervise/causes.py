"""Causes for which an attempt of a run ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """Why an attempt ended. FINISHED: the command ended with 0. UNKNOWN: nothing that is known says why."""

    FINISHED = "finished"
    WALL_CLOCK = "wall clock"
    PREEMPTION = "preemption"
    CANCELLED = "cancelled"
    LOST_NODE = "lost node"
    LOST_RANK = "lost rank"
    OUT_OF_MEMORY = "out of memory"
    DISK_FULL = "disk full"
    USER_ERROR = "user error"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of the classifier.

    reason: one line for the user, mostly the line of the log that decided. nodes: to which the failure is attributed,
    by name; none if it is not tied to nodes. error: text by which the same error of a program is recognised again;
    "" if the cause is not an error of the program, its data or its files, or if it need not come again.
    """

    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    error: str = ""
