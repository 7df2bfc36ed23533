"""Time limits of the sections of a run: limits of the recipe, and shorter limits derived from measured times.

When a limit of the recipe is over, the run always ends. When a derived limit is over, a few ranks only examine whether
a late rank is hung (`hpctrain.comm.watchdog.board.rank_status`). If a rank is hung, they end the run; otherwise the
run's own limit applies. The reasons are in docs/adr/0036. Everything except `SectionLimits` is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from hpctrain.comm.collectives.activity import Section

# A derived limit is this factor times the slowest measured time.
FACTOR = 10.0
_ENDING_SHARE = 0.25
_ENDING_AT_MOST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How the time limit of a section of the run is derived from measured times.

    least_measured: smallest number of measured times from which a limit is derived.
    window: the limit is derived from the slowest of at least this many newest times.
    least_factor: the derived limit is at least this factor times `LimitSettings.least_s`.
    """

    least_measured: int
    window: int
    least_factor: float


# The start and loading have no derived limit, because nothing has been measured when they begin. Data and checkpoints
# have larger factors, because they wait for filesystems, whose servers may be away for minutes.
RULES: Mapping[Section, _Rule] = {
    Section.STEP: _Rule(least_measured=20, window=500, least_factor=1.0),
    Section.INPUT: _Rule(least_measured=20, window=500, least_factor=5.0),
    Section.SAVE: _Rule(least_measured=2, window=20, least_factor=5.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Settings for the limits, the same on every rank.

    timeout_s: limit, in seconds, of the sections that `configured` does not contain.
    derive: True to also derive limits from measured times.
    least_s: smallest derived limit of a step, in seconds.
    configured: limits that the recipe sets for sections, in seconds.
    """

    timeout_s: float
    derive: bool = True
    least_s: float = 60.0
    configured: Mapping[Section, float] = field(default_factory=dict)

    def limit_s(self, section: Section | None) -> float:
        """Returns the limit of `section` in seconds. The run always ends when this time is over."""
        return self.timeout_s if section is None else self.configured.get(section, self.timeout_s)

    def longer_by(self, seconds: float) -> LimitSettings:
        """Returns settings in which every limit of the recipe (`timeout_s` and `configured`) is `seconds` longer."""
        configured = {section: limit_s + seconds for section, limit_s in self.configured.items()}
        return replace(self, timeout_s=self.timeout_s + seconds, configured=configured)

    def derived_s(self, section: Section, *, slowest_s: float) -> float:
        """Returns the time limit of `section` in seconds, derived from its slowest measured time.

        section: a section that has a rule in `RULES`.
        """
        return max(RULES[section].least_factor * self.least_s, FACTOR * slowest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedLimit:
    """Limit of a wait in `section`, derived from measured times.

    seconds: the limit.
    slowest_s: slowest of the last `num_measured` times of the section, in seconds.
    """

    section: Section
    seconds: float
    slowest_s: float
    num_measured: int

    @property
    def text(self) -> str:
        """Text for messages, such as `limit of a step 30 s = 10 x the slowest of the last 812, 3 s`."""
        measured = f"{FACTOR:g} x the slowest of the last {self.num_measured}, {self.slowest_s:.3g} s"
        name = f"limit of {'an' if self.section is Section.INPUT else 'a'} {self.section.value}"
        if self.seconds > FACTOR * self.slowest_s:
            return f"{name} {self.seconds:.3g} s, the minimum by limits.least_s; {measured}, is less"
        return f"{name} {self.seconds:.3g} s = {measured}"


def derive_limit(
    section: Section, *, slowest_s: float, num_measured: int, settings: LimitSettings
) -> DerivedLimit | None:
    """Returns a section's limit, derived from measured times; None if no limit below `timeout_s` can be derived."""
    rule = RULES.get(section)
    if (
        rule is None
        or not settings.derive
        or section in settings.configured
        or num_measured < rule.least_measured
    ):
        return None
    seconds = settings.derived_s(section, slowest_s=slowest_s)
    if seconds >= settings.timeout_s:
        return None
    return DerivedLimit(section=section, seconds=seconds, slowest_s=slowest_s, num_measured=num_measured)


@dataclass(slots=True)
class RecentMaximum:
    """Largest of the newest `window` to 2 x `window` values, in constant memory.

    before: largest value of an earlier run; after `window` values, the largest value of the last complete window.
    """

    window: int
    before: float = 0.0
    num: int = 0
    _here: float = 0.0

    def add(self, value: float) -> None:
        if self.num and self.num % self.window == 0:
            self.before, self._here = self._here, 0.0
        self._here = max(self._here, value)
        self.num += 1

    @property
    def largest(self) -> float:
        return max(self.before, self._here)

    @property
    def num_covered(self) -> int:
        """How many of the newest values of this run `largest` takes into account."""
        beyond = (self.num - 1) % self.window + 1 if self.num else 0
        return min(self.num, self.window + beyond)


@final
class SectionLimits:
    """The section that a rank is in, the measured times of sections, and the limits that follow from these times.

    Written by the main thread; read by the watcher and the board. `base` is the section outside of all `enter` blocks;
    None means no section.
    """

    def __init__(self, settings: LimitSettings) -> None:
        self.settings = settings
        self._base: Section | None = None
        self._now: Section | None = None
        self._measured = {section: RecentMaximum(rule.window) for section, rule in RULES.items()}
        # Sections since the step before this one began: a late rank may still be in one of them.
        self._before: frozenset[Section | None] = frozenset([None])
        self._seen: frozenset[Section | None] = frozenset([None])

    def configure(self, settings: LimitSettings) -> None:
        """Replaces the settings, also on a running watcher."""
        self.settings = settings

    @property
    def now(self) -> Section | None:
        return self._now

    @property
    def name(self) -> str:
        """Name of the current section; "" if there is none."""
        return "" if self._now is None else self._now.value

    @property
    def base(self) -> Section | None:
        return self._base

    @base.setter
    def base(self, section: Section | None) -> None:
        self._base = section
        self._before = self._seen = frozenset()
        self._be_in(section)

    @contextlib.contextmanager
    def enter(self, section: Section | None) -> Iterator[None]:
        """Marks the `with` block as part of `section`. The innermost section counts."""
        outer = self._now
        if section is Section.STEP and outer is not Section.STEP:
            self._before, self._seen = self._seen, frozenset()
        self._be_in(section)
        try:
            yield
        finally:
            self._now = outer

    def _be_in(self, section: Section | None) -> None:
        self._now = section
        self._seen |= {section}

    # ---- what was measured

    def measure(self, section: Section, seconds: float) -> None:
        """Adds a measured time of `section`. `seconds` must be the same on every rank."""
        self._measured[section].add(seconds)

    def slowest(self, section: Section) -> tuple[float, int]:
        """Returns the slowest recent time of `section`, and the number of times of this attempt that were compared.

        The slowest time of earlier attempts is taken into account too.
        """
        found = self._measured[section]
        return found.largest, found.num_covered

    def count_earlier(self, slowest_s: Mapping[str, float]) -> None:
        """Takes the slowest times of earlier attempts into account, by section name. This can only raise limits."""
        for section, found in self._measured.items():
            found.before = max(found.before, slowest_s.get(section.value, 0.0))

    def record(self) -> dict[str, dict[str, float | None]]:
        """Returns each section's limit, derived limit, slowest measured time and number of measured times."""
        found: dict[str, dict[str, float | None]] = {}
        for section in Section:
            derived = self.derived(section)
            slowest_s, num = self.slowest(section) if section in self._measured else (None, None)
            found[section.value] = {
                "limit_s": self.settings.limit_s(section),
                "derived_s": None if derived is None else derived.seconds,
                "slowest_s": slowest_s,
                "measured": num,
            }
        return found

    def derived(self, section: Section | None) -> DerivedLimit | None:
        """Returns the limit derived from measured times of `section`; None if no limit can be derived at present."""
        if section is None or (found := self._measured.get(section)) is None:
            return None
        return derive_limit(
            section, slowest_s=found.largest, num_measured=found.num_covered, settings=self.settings
        )

    # ---- what applies now

    def _open(self) -> frozenset[Section | None]:
        """Returns the sections of the run in which a rank that this rank waits for may be.

        INPUT is one of them only if this rank is in it: the limit of a step includes the input of the step.
        """
        return (self._before | self._seen) - {Section.INPUT} | {self._now}

    @property
    def limit_s(self) -> float:
        """Seconds after the start of an operation in the current section after which every waiting rank has exited."""
        return self.settings.limit_s(self._now)

    @property
    def ending_s(self) -> float:
        """Last part of `limit_s`, in seconds, in which the ranks report and exit."""
        return min(_ENDING_AT_MOST_S, _ENDING_SHARE * self.limit_s)

    @property
    def wait_limit_s(self) -> float:
        """Seconds that a rank waits before it ends the run: `limit_s` minus `ending_s`."""
        limit_s = self.limit_s
        return limit_s - min(_ENDING_AT_MOST_S, _ENDING_SHARE * limit_s)

    @property
    def first_limit_s(self) -> float:
        """Seconds of waiting after which a late rank may be judged as hung.

        Equal to `wait_limit_s` if there is no derived limit.
        """
        early = self.early
        return self.wait_limit_s if early is None else min(early.seconds, self.wait_limit_s)

    @property
    def early(self) -> DerivedLimit | None:
        """Limit of a wait in the current section, derived from measured times.

        None if no limit could be derived yet, or if a late rank may be in a section that has no derived limit, or
        outside of all sections.
        """
        return self.derived(self._now) if all(section in RULES for section in self._open()) else None

    def early_s_of(self, section: Section | None) -> float | None:
        """Returns after how many seconds a late rank that is in `section` may be judged as hung; None means never."""
        own, found = self.early, self.derived(section)
        return None if own is None or found is None else max(own.seconds, found.seconds)

    @property
    def early_everywhere_s(self) -> float | None:
        """Seconds after which a late rank in an unknown section may be judged as hung; None means never."""
        each = [self.early_s_of(section) for section in self._open() | {Section.INPUT}]
        return None if None in each else max(seconds for seconds in each if seconds is not None)
