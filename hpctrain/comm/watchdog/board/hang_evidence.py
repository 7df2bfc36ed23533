"""Whether a rank that others wait for is hung, by what its node says of it before the run's own limit is over. Pure.

Slow is not hung: a rank that computes, or waits for a file, is left alone until the run's own limit. See docs/adr/0036.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.comm.watchdog.board.processes import Activity
from hpctrain.comm.watchdog.board.rank_status import Absence, Placement, Positions, RankPosition

# A process that has used less of one core than this is idle: the threads of the watchdog use less.
_IDLE_SHARE = 0.05
_IDLE_FOR = 1 / 8  # of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLimits:
    """Seconds after which a late rank may be found hung; None: never.

    here_s: whatever section it is in. everywhere_s: if its section is not known. of: of a section, by its name.
    """

    here_s: float
    everywhere_s: float | None
    of: Callable[[str], float | None]


class IdleSince:
    """When each rank's process was last found to have used a processor, from looks at all of them."""

    def __init__(self) -> None:
        self._last: dict[int, Activity] = {}

    def update(self, positions: Positions) -> None:
        """Adds a look."""
        for rank, position in positions.by_rank.items():
            if position.activity is not None and not self._is_idle(rank, position.activity):
                self._last[rank] = position.activity

    def seconds(self, rank: int, now: Activity) -> float:
        """Returns for how long the process of `rank` has used no processor, as far as is known."""
        last = self._last.get(rank)
        return 0.0 if last is None else now.looked - last.looked

    def _is_idle(self, rank: int, now: Activity) -> bool:
        last = self._last.get(rank)
        if last is None:
            return False
        # Less than before: a process that it has started has ended, so that it does something.
        return 0.0 <= now.cpu_s - last.cpu_s <= _IDLE_SHARE * max(1.0, now.looked - last.looked)


def find_hung(
    absences: Sequence[Absence],
    *,
    now: Positions,
    idle: IdleSince,
    placement: Placement,
    answers: Mapping[str, bool],
    group: str,
    waited_s: float,
    limits: EarlyLimits,
) -> list[str]:
    """Returns who is hung and why, a text for each; empty if no rank is.

    absences: ranks that have not begun an operation of `group`, at `now`. idle: from earlier looks and this one.
    answers: for each host that was probed, whether it answered. waited_s: age of the operation.
    """
    hung = []
    for absence in absences:
        position = now.by_rank.get(absence.ranks[0])
        if position is None:
            node = placement.node_names[placement.node_of_rank[absence.ranks[0]]]
            if waited_s > limits.here_s and answers.get(node) is False:
                hung.append(f"{node} does not answer")
            continue
        is_silent = absence.silent_s is not None
        why = _why_hung(
            position, idle=idle, is_silent=is_silent, group=group, waited_s=waited_s, limits=limits
        )
        if why is not None:
            hung.append(f"rank {position.rank} on {position.host} {why}")
    return hung


def _why_hung(
    position: RankPosition,
    *,
    idle: IdleSince,
    is_silent: bool,
    group: str,
    waited_s: float,
    limits: EarlyLimits,
) -> str | None:
    activity = position.activity
    if activity is None or not activity.may_be_hung:
        return None
    if activity.is_over:
        return activity.state if waited_s > limits.here_s else None
    if any(place.waiting_s is not None for name, place in position.groups.items() if name != group):
        return None  # it waits for others itself
    limit_s = limits.everywhere_s if is_silent else limits.of(position.section)
    idle_s = idle.seconds(position.rank, activity)
    if limit_s is None or waited_s <= limit_s or idle_s < _IDLE_FOR * limits.here_s:
        return None
    what = "its interpreter is blocked" if is_silent else f"it waits in no operation ({position.section})"
    return f"has used no processor for {idle_s:.0f} s, and {what}"
