"""Stacks in one line, and those of many ranks in a few."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, strategies as st

import hpctrain
from hpctrain.comm.watchdog.board.short_stacks import (
    REDUCTION_THREAD,
    Frame,
    fold_stacks,
    own_stack,
    shorten,
    thread_frames,
    without_stack,
)
from hpctrain.comm.watchdog.timeout_report import describe_stacks

LIBRARIES = sysconfig.get_path("purelib")
STANDARD = sysconfig.get_path("stdlib")
OURS = str(Path(hpctrain.__file__).parent)


def test_the_users_frames_stay_and_of_a_library_the_innermost() -> None:
    frames = [
        Frame(f"{LIBRARIES}/torch/nn/functional.py", 10, "linear"),
        Frame(f"{LIBRARIES}/torch/nn/modules/linear.py", 125, "forward"),
        Frame("/home/me/model.py", 12, "forward"),
        Frame("/home/me/model.py", 3, "block"),
        Frame(f"{LIBRARIES}/torch/nn/modules/module.py", 1736, "_call_impl"),
        Frame("/home/me/task.py", 41, "loss"),
        Frame(f"{OURS}/train/task/task_runner.py", 80, "forward_backward"),
        Frame(f"{OURS}/train/loop/training.py", 150, "_step"),
        Frame(f"{OURS}/cli/train.py", 90, "train"),
        Frame("/usr/bin/hpctrain", 8, "<module>"),
    ]
    assert shorten(frames) == (
        "torch/functional.py:10 linear < model.py:12 forward < model.py:3 block < torch/module.py:1736 _call_impl < "
        "task.py:41 loss < hpctrain/task_runner.py:80 forward_backward"
    )
    wait = Frame(f"{STANDARD}/threading.py", 359, "wait")
    assert shorten([wait, *frames[-3:]]) == "threading.py:359 wait < hpctrain/training.py:150 _step"
    assert shorten([frames[-1], Frame("<frozen runpy>", 88, "_run_code")]).endswith(
        "<module> < <frozen runpy>:88 _run_code"
    )
    assert shorten([]) == ""


def test_a_rank_shows_where_its_main_thread_and_its_reduction_are() -> None:
    over, ready = threading.Event(), threading.Barrier(3)

    def users_code() -> None:
        ready.wait()
        over.wait(300)

    def reduces() -> None:
        ready.wait()
        while not over.is_set():
            time.sleep(0.01)

    main = threading.Thread(target=users_code)
    reduction = threading.Thread(target=reduces, name=REDUCTION_THREAD)
    for thread in (main, reduction):
        thread.start()
    ready.wait()
    assert main.ident is not None
    deadline_s, found = time.monotonic() + 300, ""
    while not ("users_code" in found and " wait < " in found and "; reduction: " in found):
        assert time.monotonic() < deadline_s, found
        found = own_stack(main.ident)
    over.set()
    for thread in (main, reduction):
        thread.join()
    name = os.path.basename(__file__)
    assert f"threading.py:{found.split(':')[1].split()[0]} wait < {name}:" in found
    assert " reduces < threading.py:" in found.partition("; reduction: ")[2]


def test_equal_stacks_are_told_together_late_ranks_first() -> None:
    late = {
        3: "a.py:1 f",
        4: without_stack(""),
        5: without_stack("is stopped"),
        6: without_stack("is stopped"),
    }
    groups = fold_stacks(late, {0: "x.py:2 g", 1: "x.py:2 g", 2: "x.py:2 g", 7: "y.py:3 h"})
    assert describe_stacks(groups) == [
        "stacks, the innermost call first:",
        "  rank 3 is at a.py:1 f",
        "  rank 4: no stack: interpreter blocked",
        "  ranks 5-6: no stack: interpreter blocked (the process is stopped)",
        "  ranks 0-2 wait at x.py:2 g",
        "  rank 7 waits at y.py:3 h",
    ]
    assert describe_stacks([]) == []


@given(
    st.dictionaries(st.integers(0, 200), st.sampled_from("abcdefghijklmnop")),
    st.dictionaries(st.integers(201, 400), st.sampled_from("abcdefghijklmnop")),
)
def test_each_rank_is_in_one_group_and_few_lines_are_told(
    late: dict[int, str], waiting: dict[int, str]
) -> None:
    groups = fold_stacks(late, waiting)
    assert sorted(rank for group in groups for rank in group.ranks) == sorted([*late, *waiting])
    for group in groups:
        stacks = late if group.late else waiting
        assert {stacks[rank] for rank in group.ranks} == {group.text}
    assert [group.late for group in groups] == sorted((group.late for group in groups), reverse=True)
    lines = describe_stacks(groups)
    assert len(lines) <= 14
    others = len([group for group in groups if group.late][8:]) + len([g for g in groups if not g.late][4:])
    assert (
        (f"{others} other stacks" in lines[-1] if lines else "") if others else "other" not in " ".join(lines)
    )


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_frames_of_all_threads_are_read(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    read, during = sys._current_frames, []

    def noted() -> dict[int, FrameType]:
        during.append(gc.isenabled())
        return read()

    monkeypatch.setattr(sys, "_current_frames", noted)
    if not collects:
        gc.disable()
    try:
        assert threading.get_ident() in thread_frames()
        assert during == [False]
        assert gc.isenabled() is collects
    finally:
        gc.enable()
