"""Schedule, generators, records, progress line, task import: the parts around the loop."""

from __future__ import annotations

import io
import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.errors import RecipeError
from hpctrain.telemetry import CLOCK_KEYS, RecordWriter, StepClock, read_records, write_json
from hpctrain.train.loop.recorder import ProgressLine
from hpctrain.train.loop.settings import CheckpointPolicy
from hpctrain.train.state.seeds import capture_generators, derive_seed, restore_generators, seed_generators
from hpctrain.train.task.schedule import Decay, Schedule, scaled_lr
from hpctrain.train.task.task import import_task

# ---------------------------------------------------------------------- schedule


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    schedule = Schedule(peak_lr=0.4, total_steps=100, warmup_steps=4)
    assert [schedule.lr(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_cosine_ends_at_its_final_fraction() -> None:
    schedule = Schedule(peak_lr=1.0, total_steps=100, warmup_steps=10, decay=Decay.COSINE, final_fraction=0.1)
    assert schedule.lr(10) == pytest.approx(1.0)
    assert schedule.lr(55) == pytest.approx(0.55)
    assert schedule.lr(100) == schedule.lr(200) == pytest.approx(0.1)


def test_step_decay_multiplies_every_so_often() -> None:
    schedule = Schedule(peak_lr=1.0, total_steps=9, decay=Decay.STEP, step_every=3, step_factor=0.5)
    assert [schedule.lr(step) for step in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_follows_the_batch(scaling: str, expected: float) -> None:
    assert scaled_lr(0.1, scaling=scaling, global_batch=1024, reference_batch=256) == pytest.approx(expected)


def test_a_checkpoint_is_due_by_steps_and_by_time() -> None:
    policy = CheckpointPolicy(directory=Path(), every_steps=10, every_minutes=0.5)
    assert [step for step in range(1, 31) if policy.due_by_step(step)] == [10, 20, 30]
    assert not policy.due_by_time(29.9)
    assert policy.due_by_time(30.0)
    never = CheckpointPolicy(directory=Path())
    assert not never.due_by_step(10)
    assert not never.due_by_time(1e9)


# ---------------------------------------------------------------------- generators


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(1))]


def test_generators_continue_to_the_bit_after_a_round_trip() -> None:
    seed_generators(3)
    random.gauss(0, 1)  # leaves a second value waiting, which is part of the state
    np.random.randn()
    state = {name: tensor.clone() for name, tensor in capture_generators(torch.device("cpu")).items()}
    expected = [draw() for _ in range(5)]
    seed_generators(99)
    restore_generators(state, device=torch.device("cpu"), otherwise=1)
    assert [draw() for _ in range(5)] == expected


def test_a_run_on_the_cpu_saves_no_generator_of_a_gpu_that_was_only_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU on some machines only, all ranks use the CPU, and CUDA is initialised on some: all save the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert sorted(capture_generators(torch.device("cpu"))) == ["numpy", "python", "torch"]


def test_seeds_differ_by_purpose_and_rank_and_fit_a_generator() -> None:
    seeds = {
        derive_seed(1, "model"),
        derive_seed(2, "model"),
        *(derive_seed(1, "rank", r) for r in range(100)),
    }
    assert len(seeds) == 102
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "model") == derive_seed(1, "model")


# ---------------------------------------------------------------------- records


def test_records_are_json_lines_without_nan_and_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    writer = RecordWriter(path)
    writer.write({"step": 1, "loss": math.nan, "seconds": {"step": 0.5, "deep": [math.inf]}})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_records(path)) == [{"step": 1, "loss": "nan", "seconds": {"step": 0.5, "deep": ["inf"]}}]


def test_records_after_a_torn_line_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = RecordWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_steps_are_collected_and_other_records_written_at_once(tmp_path: Path) -> None:
    path, now = tmp_path / "rank-00000.jsonl", [0.0]
    writer = RecordWriter(path, every_s=1.0, clock=lambda: now[0])

    def write(kind: str, step: int, *, at_s: float) -> list[int]:
        now[0] = at_s
        writer.write({"kind": kind, "step": step})
        return [record["step"] for record in read_records(path)]

    assert write("step", 1, at_s=0.4) == []
    assert write("step", 2, at_s=0.9) == []
    assert write("step", 3, at_s=1.1) == [1, 2, 3]
    assert write("step", 4, at_s=2.0) == [1, 2, 3]
    assert write("checkpoint", 4, at_s=2.0) == [1, 2, 3, 4, 4]
    assert write("step", 5, at_s=2.1) == [1, 2, 3, 4, 4]
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4, 4, 5]


def test_a_rank_that_records_no_steps_makes_its_file_with_its_first_record(tmp_path: Path) -> None:
    path = tmp_path / "rank-00037.jsonl"
    writer = RecordWriter(path, kinds=["damage"])
    writer.write({"kind": "step", "step": 1})
    writer.write({"kind": "evaluation", "step": 1})
    assert not path.exists()
    writer.write({"kind": "damage", "step": 1})
    assert [record["kind"] for record in read_records(path)] == ["damage"]
    writer.close()


def bytes_read_by_this_process() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def test_of_long_records_only_the_end_is_read_when_they_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    line = b'{"step": 1, "pad": "' + b"x" * 1000 + b'"}\n'
    whole = line * 40_000
    path.write_bytes(whole + b'{"step": 2, "lo')
    before = bytes_read_by_this_process()
    tracemalloc.start()
    try:
        RecordWriter(path).close()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bytes_read_by_this_process() - before < 1 << 20
    assert most < 1 << 20
    assert path.stat().st_size == len(whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b'{"step": 1}\n', b'{"step": 1}\n'),
        (b'{"step": 1}\n' + b"x" * 300_000, b'{"step": 1}\n'),  # longer than what is read at once
        (b"x" * 300_000, b""),
        (b"x" * 65_536 + b"\n" + b"y" * 65_536, b"x" * 65_536 + b"\n"),
    ],
    ids=["empty", "whole", "long", "no line", "at the border of blocks"],
)
def test_a_torn_line_of_any_length_is_dropped(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(before)
    RecordWriter(path).close()
    assert path.read_bytes() == after


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_the_clock_adds_up_spans_until_the_lap() -> None:
    clock = StepClock()
    clock.add("input", seconds=1.0)
    clock.add("input", seconds=0.5)
    with pytest.raises(ValueError), clock.span("compute"):
        raise ValueError
    lap = clock.lap()
    assert lap["input"] == 1.5
    assert 0 <= lap["compute"] <= lap["step"]
    again = clock.lap()
    assert again["step"] == again["other"] > 0.0  # nothing is left of the lap before
    assert [again[part] for part in (*CLOCK_KEYS, "after_sync")] == [0.0] * (len(CLOCK_KEYS) + 1)


def test_a_bubble_is_taken_out_of_computing_and_the_observer_sees_it_within() -> None:
    clock, seen = StepClock(), []
    clock.observer = lambda *span: seen.append(span)
    clock.add("compute", seconds=2.0, ended=12.0, what="forward and backward")
    clock.recount(10.5, 11.25, of="compute", to="bubble")
    assert seen == [("forward and backward", 10.0, 12.0), ("bubble", 10.5, 11.25)]
    lap = clock.lap()
    assert (lap["compute"], lap["bubble"]) == (1.25, 0.75)


# ---------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reported(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, on_terminal: bool, silent: bool = False
) -> str:
    monkeypatch.setattr("sys.stdout", stream)
    line = ProgressLine(total_steps=3, every_s=1e-9, silent=silent, on_terminal=on_terminal)
    for step in (1, 2, 3):
        line.step(step=step, epoch=0, loss=0.5, lr=0.1, num_samples=8)
    line.say("held out: 0.9")
    return stream.getvalue()


def test_progress_is_one_renewed_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reported(monkeypatch, Terminal(), on_terminal=True)
    assert text.count("\n") == 1  # only the line that `say` adds
    assert text.count("\r") == 5
    assert "step 3/3" in text
    assert "samples/s" in text


@pytest.mark.parametrize(("stream", "on_terminal"), [(io.StringIO(), True), (Terminal(), False)])
def test_progress_is_plain_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, on_terminal: bool
) -> None:
    text = reported(monkeypatch, stream, on_terminal=on_terminal)
    assert "\r" not in text
    assert text.count("\n") == 4


def test_progress_is_silent_on_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(monkeypatch, io.StringIO(), on_terminal=False, silent=True) == ""


def test_a_reader_that_has_gone_does_not_end_the_program() -> None:
    script = "from hpctrain.telemetry import tell\nfor n in range(20000): tell(str(n))\nraise SystemExit(75)"
    command = f"{sys.executable} -c '{script}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "0\n", "")


# ---------------------------------------------------------------------- task


def test_a_task_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "tasks_of_mine.py").write_text(
        "class Task:\n"
        "    def __init__(self, *, width=3): self.width = width\n"
        "    def build_model(self): ...\n"
        "    def loss(self, model, fields): ...\n"
        "    def metrics(self, model, fields): ...\n"
        "class Half:\n"
        "    def build_model(self): ...\n"
        "text = 'no class'\n"
    )
    (tmp_path / "broken_task.py").write_text("raise OSError('library missing')\n")
    task = import_task("tasks_of_mine:Task", options={"width": 5}, search=[tmp_path])
    assert task.width == 5  # type: ignore[attr-defined]
    for target, options, expected in [
        ("tasks_of_mine:Task", {"depth": 5}, "task.options do not fit"),
        ("tasks_of_mine:Half", {}, "has no method loss, metrics"),
        ("tasks_of_mine:text", {}, "is str, not a class"),
        ("tasks_of_mine:Gone", {}, "has no attribute 'Gone'"),
        ("broken_task:Task", {}, "raised OSError: library missing"),
        ("not_there:Task", {}, "No module named 'not_there'"),
    ]:
        with pytest.raises(RecipeError, match=r".") as caught:
            import_task(target, options=options, search=[tmp_path])
        assert expected in str(caught.value)
