"""Decides when a run stops before its last step: after a signal, or when its time limit is near."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from hpctrain.comm import Collective, all_gather_distinct, describe_ranks, on_rank_0
from hpctrain.errors import ExitCode
from hpctrain.resilience import StopRequest, TimeToStop, WallClock

# Reading a checkpoint back must leave the ranks time to end.
_VERIFY_AT_MOST_S = 60.0
_LEAVING_TAKES_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EndReason:
    """Why a run stopped, the same on every rank.

    reason: the reason, as text.
    time_left_s: seconds that were left until the time limit of the run; None if no limit is known.
    """

    reason: str
    time_left_s: float | None


@final
class EarlyEnd:
    """Decides whether the run stops early.

    The ranks agree in each step: the numbers of `votes` are summed over the ranks, and `agreed` reads the sums.

    Args:
        request: The request to stop that this rank has received by a signal, if any.
        plan: The estimate of the time that a stop takes.
        clock: The clock of the time limit. Only one rank has a clock, so that differences between the ranks' clocks do
            not matter; None on all other ranks.
        say: A function that prints a line for the user, on rank 0.
    """

    def __init__(
        self,
        request: StopRequest,
        *,
        comm: Collective,
        plan: TimeToStop,
        clock: WallClock | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.plan = plan
        self._request = request
        self._comm = comm
        self._clock = clock
        self._say = say
        self._time_was_up = False

    def print_time_limit_changes(self) -> None:
        """Prints the time at which the run must end, when it becomes known or changes. Not collective."""
        if self._clock is not None and (news := self._clock.news()) is not None:
            self._say(news)

    def votes(self, *, num_saves: int = 1, evaluates: bool = False) -> dict[str, float]:
        """Returns this rank's votes on whether the run must stop early, as numbers by name. Not collective.

        Each step sums the votes over the ranks, and passes the sums to `agreed`.

        num_saves: number of saves for which the run must wait if it stops, including the last one.
        evaluates: True if an evaluation comes before the next votes.
        """
        time_up = False
        if self._clock is not None:
            self.print_time_limit_changes()
            left_s = self._clock.time_left_s()
            time_up = self.plan.must_stop(left_s, num_saves=num_saves, evaluates=evaluates)
        return {"stop": float(self._request.requested), "time_up": float(time_up)}

    def agreed(self, sums: Mapping[str, float]) -> bool:
        """Returns True if the run stops after this step; the same on every rank.

        sums: the numbers of `votes`, summed over the ranks.
        """
        self._time_was_up = sums["time_up"] > 0
        return self._time_was_up or sums["stop"] > 0

    def saved(self) -> None:
        """Records that the state is saved.

        From now on, a second signal ends this rank at once, with the exit code of a run that stopped early and saved.
        """
        self._request.leave_code = int(ExitCode.STOPPED_EARLY)

    def has_time_to_verify(self) -> bool:
        """Returns True if there is time to read the checkpoint back before the run must end. Collective."""

        def has_time() -> bool:
            left_s = self._clock.time_left_s() if self._clock is not None else None
            longest_s = (
                _VERIFY_AT_MOST_S if left_s is None else min(_VERIFY_AT_MOST_S, left_s - _LEAVING_TAKES_S)
            )
            return self.plan.save_s < longest_s

        return bool(on_rank_0(self._comm, has_time))

    def why(self) -> EndReason:
        """Returns why the run stops: which signals which ranks have received, or the time limit. Collective."""
        names, name_of_rank = all_gather_distinct(self._comm, self._request.signal_name)
        reasons = []
        for number, name in enumerate(names):
            ranks = [rank for rank, found in enumerate(name_of_rank) if found == number]
            if name is not None:
                reasons.append(name if len(names) == 1 else f"{name} on {describe_ranks(ranks)}")
        source, left_s = on_rank_0(self._comm, self._left)
        if self._time_was_up:
            reasons.append(source)
        return EndReason(reason=", ".join(reasons), time_left_s=left_s)

    def _left(self) -> tuple[str | None, float | None]:
        if self._clock is None or self._clock.end is None:
            return None, None
        return self._clock.end.source, self._clock.time_left_s()
