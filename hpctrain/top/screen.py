"""Draws the state of a run with rich. Pure: equal state and width give equal text."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from hpctrain.telemetry import STEP_PARTS, in_words
from hpctrain.top.state import RunState

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#@"
_STYLES = {"good": "bold green", "note": "bold yellow", "problem": "bold red"}
_WIDEST_BAR = 100
_MOST_INCIDENTS = 5


def draw(state: RunState, *, width: int, ascii_only: bool = False) -> Group:
    """Returns the view of the state as lines of text.

    Lines that are longer than `width` columns are cut, but the list of a step's parts continues on the next line.
    """
    lines = [_head(state), _place(state), _progress(state), _loss(state, width=width, ascii_only=ascii_only)]
    lines += [_speed(state), *_parts(state, width=width), *_slowest(state), _checkpoint(state)]
    if state.advice:
        lines.append(_line("nodes", state.advice))
    if state.quality:
        lines.append(_line("held out", state.quality))
    lines += [_line("note", note) for note in state.notes]
    lines += [_line("ledger", text) for text in state.attempts]
    lines += [
        _line(time.strftime("%H:%M:%S", time.localtime(at)), text)
        for at, text in state.incidents[-_MOST_INCIDENTS:]
    ]
    if ascii_only:
        for line in lines:
            line.overflow = "crop" if line.no_wrap else None
    return Group(*lines)


def sparkline(values: Sequence[float], *, width: int, ascii_only: bool = False) -> str:
    """Returns the values as a curve of at most `width` characters.

    Each character shows the mean of adjacent values, or is "!" if no adjacent value is finite.
    """
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    count = min(width, len(values))
    groups = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = [_mean([value for value in group if math.isfinite(value)]) for group in groups]
    finite = [mean for mean in means if mean is not None]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (most - least) if most > least else 0.0
    return "".join("!" if mean is None else levels[round((mean - least) * scale)] for mean in means)


def bar(parts: Mapping[str, float], *, width: int) -> str:
    """Returns `width` letters that show the shares of a step's parts; "" if the shares are not known."""
    ends, share = [], 0.0
    for part in STEP_PARTS:
        share += parts.get(part.name, 0.0)
        ends.append(round(share * width))
    begins = [0, *ends[:-1]]
    # Letters, so that the bar can be read without colours.
    return "".join(
        part.letter * (end - begin) for part, begin, end in zip(STEP_PARTS, begins, ends, strict=True)
    )


def _head(state: RunState) -> Text:
    text = _cut(state.name or "run", "bold")
    text.append("  ")
    return text.append(state.status, _STYLES[state.kind])


def _place(state: RunState) -> Text:
    ranks = f"{state.num_ranks} rank{'s' * (state.num_ranks != 1)}"
    return _cut(f"{ranks} on {state.num_nodes} node{'s' * (state.num_nodes != 1)}  {state.directory}", "dim")


def _progress(state: RunState) -> Text:
    step = "none" if state.step is None else f"{state.step:,}"
    found = [step]
    if state.total_steps:
        found = [f"{step} of {state.total_steps:,}", f"{(state.step or 0) / state.total_steps:.0%}"]
    if state.epoch is not None:
        found.append(f"epoch {state.epoch}")
    if state.to_go_s is not None:
        found.append(f"to go {in_words(state.to_go_s)}")
    if state.left_s is not None:
        found.append(
            f"time limit in {in_words(state.left_s)}" if state.left_s > 0 else "time limit has passed"
        )
    return _line("step", "  ".join(found))


def _loss(state: RunState, *, width: int, ascii_only: bool) -> Text:
    if state.loss is None:
        return _line("loss", "none yet")
    shown = f"{state.loss:<10.4g}"
    left = width - len(shown) - 13
    curve = sparkline(state.losses, width=left, ascii_only=ascii_only) if left > 0 else ""
    return _line("loss", f"{shown} {curve}")


def _speed(state: RunState) -> Text:
    found = "unknown" if state.samples_per_s is None else f"{state.samples_per_s:,.0f} samples/s"
    if state.step_s is not None:
        p50, p95, p99 = (f"{1e3 * seconds:,.3g}" for seconds in state.step_s)
        found += f"  step {p50} ms (p95 {p95}, p99 {p99}; {state.num_steps} steps)"
    return _line("speed", found)


def _parts(state: RunState, *, width: int) -> list[Text]:
    if not state.parts:
        return []
    letters = bar(state.parts, width=min(width, _WIDEST_BAR))
    drawn = Text(no_wrap=True)
    legend = []
    for part in STEP_PARTS:
        drawn.append(part.letter * letters.count(part.letter), part.style)
        if state.parts[part.name] >= 0.005:
            named = f" {part.label} {state.parts[part.name]:.0%}  "
            legend.append(_cut("", "").append(part.letter, part.style).append(named))
    return [drawn, *_filled([*legend, Text(f"({state.parts_of})", style="dim")], width=width)]


def _filled(items: Sequence[Text], *, width: int) -> list[Text]:
    """Returns the items in lines of at most `width` columns. An item that is longer has a line of its own."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + item.cell_len <= width:
            lines[-1].append(item)
        else:
            lines.append(item)
    return lines


def _slowest(state: RunState) -> list[Text]:
    if not state.slowest:
        return []
    ranks = "  ".join(
        f"rank {each.rank} ({each.node}) {1e3 * each.own_s:,.3g} ms, x {each.factor:.2f}"
        for each in state.slowest
    )
    some = f" (of the {state.num_followed} that are read)" if state.num_followed < state.num_ranks else ""
    return [_line("slowest", ranks + some)]


def _checkpoint(state: RunState) -> Text:
    if state.checkpoint_step is None or state.checkpoint_age_s is None:
        return _line("saved", "no checkpoint yet")
    return _line("saved", f"step {state.checkpoint_step:,}, {in_words(state.checkpoint_age_s)} ago")


def _line(name: str, text: str) -> Text:
    return _cut("", "").append(f"{name:<10}", "dim").append(text)


def _cut(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
