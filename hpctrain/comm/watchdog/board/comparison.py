"""Ranks in one operation must have passed equal arguments: when that is compared, and which rank differs. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hpctrain.comm.watchdog.board.rank_status import GroupPosition, RankPosition

# After this time in one operation the ranks' signatures are compared: have all passed the same buffer?
_COMPARE_AFTER_S = 2.0
COMPARE_AT_MOST_AFTER_S = 4.0
_COMPARISONS = 3  # per operation, since ranks enter it and renew their files at different times


@dataclass(slots=True)
class ComparisonSchedule:
    """Says when the signatures of ranks in one operation are compared. timeout_s: of an operation."""

    timeout_s: float
    _after_s: float = field(init=False)
    _compared: dict[str, tuple[int, int]] = field(default_factory=dict)  # group -> sequence, times

    def __post_init__(self) -> None:
        self._after_s = min(_COMPARE_AFTER_S, self.timeout_s / 4)

    def due(self, positions: Iterable[RankPosition]) -> dict[str, int]:
        """Returns the groups that are to be compared now, with the number of comparisons left afterwards.

        positions: of the ranks of one node.
        """
        longest: dict[str, GroupPosition] = {}
        for position in positions:
            for group, place in position.groups.items():
                if place.waiting_s is not None and place.signature is not None:
                    longest[group] = max(longest.get(group, place), place, key=_progress_of)
        left = {group: self._left(group, place) for group, place in longest.items()}
        return {group: number for group, number in left.items() if number is not None}

    def _left(self, group: str, place: GroupPosition) -> int | None:
        sequence, times = self._compared.get(group, (0, 0))
        if sequence != place.sequence and times:
            # That operation was only slow, and so may the next be: compare later, to save file accesses.
            del self._compared[group]
            self._after_s = min(COMPARE_AT_MOST_AFTER_S, self.timeout_s / 4, 2 * self._after_s)
            times = 0
        if times == _COMPARISONS or (place.waiting_s or 0.0) < (1 + times / 2) * self._after_s:
            return None
        self._compared[group] = (place.sequence, times + 1)
        return _COMPARISONS - times - 1


def _progress_of(place: GroupPosition) -> tuple[int, float]:
    return place.sequence, place.waiting_s or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks in one operation of `group` with different signatures. ranks: all in it. text: error message."""

    group: str
    sequence: int
    ranks: tuple[int, ...]
    text: str


def find_mismatch(positions: Mapping[int, RankPosition], *, decided: Collection[str] = ()) -> Mismatch | None:
    """Returns the first operation whose ranks have different signatures, None if there is none.

    The most frequent signature counts as correct, in a tie the lowest rank's. A tie counts only if all ranks of the
    group are in the operation, or the group is one of `decided`: else the next rank to come may decide.
    """
    held: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    members: dict[str, int] = {}
    for rank in sorted(positions):
        for group, place in positions[rank].groups.items():
            if place.waiting_s is not None and place.signature is not None:
                held[group, place.sequence][rank] = place.signature
                members[group] = place.num_ranks
    for (group, sequence), signatures in held.items():
        counts = Counter(signatures.values())
        usual, num_usual = counts.most_common(1)[0]  # of equally frequent ones the first seen
        is_tie = 2 * num_usual <= len(signatures)
        if len(counts) == 1 or (is_tie and len(signatures) < members[group] and group not in decided):
            continue
        different = [
            f"rank {rank} on {positions[rank].host} has {signature}"
            for rank, signature in signatures.items()
            if signature != usual
        ]
        text = (
            f"ranks called number {sequence} of {group} with different arguments: {', '.join(different[:8])}, "
            f"where {num_usual} of {len(signatures)} have {usual}"
        )
        return Mismatch(group=group, sequence=sequence, ranks=tuple(signatures), text=text)
    return None
