"""How many ranks an elastic run has, and what is said and decided when their number changes. No rank is started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import LaunchError, UsageError
from hpctrain.resilience import NOTICES_VARIABLE, print_notice
from hpctrain.supervise.attempt_watch import AttemptWatch, Notices
from hpctrain.supervise.classify import AttemptEnd, Evidence, classify
from hpctrain.supervise.elastic import (
    Elastic,
    ElasticRange,
    ResizeWatch,
    elastic_batch,
    ranks_of_one_model,
    read_slots,
)
from hpctrain.supervise.ledger import RunProgress
from hpctrain.supervise.nodes import NodeWatch

TWO_TO_EIGHT = ElasticRange(least=2, most=8)


@pytest.mark.parametrize("text", ["", "4", "4:", ":4", "4:2", "0:4", "a:b", "1:2:3", "-1:2", "1.5:2"])
def test_what_is_not_a_range_is_refused_with_the_form_that_is_meant(text: str) -> None:
    with pytest.raises(UsageError, match="write MIN:MAX"):
        ElasticRange.parse(text)


def test_a_range_may_be_a_single_number() -> None:
    assert ElasticRange.parse("3:3") == ElasticRange(least=3, most=3)


@pytest.mark.parametrize(
    ("slots", "unit", "ranks"),
    [(0, 1, 0), (1, 1, 0), (2, 1, 2), (5, 1, 5), (8, 1, 8), (9, 1, 8), (7, 4, 4), (3, 4, 0), (9, 4, 8)],
)
def test_as_many_ranks_as_slots_within_the_range_in_whole_copies_of_the_model(
    slots: int, unit: int, ranks: int
) -> None:
    assert Elastic(range=TWO_TO_EIGHT, unit=unit).ranks_for(slots) == ranks


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("localhost slots=4\n", 4),
        ("# mine\nvm slots=2 max_slots=3\nlocalhost:3  # more\n\n", 5),
        ("vm\n", 1),
        ("", 0),
        ("localhost slots=0", 0),
    ],
)
def test_the_slots_of_this_machine_are_read_as_mpirun_reads_them(text: str, slots: int) -> None:
    assert read_slots(text, host="vm.example.org", where="hosts") == slots


@pytest.mark.parametrize(
    ("text", "said"),
    [("other slots=2", "names the machine other"), ("localhost slots=x", "no number of slots")],
)
def test_another_machine_or_no_number_is_refused(text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_slots(text, host="vm", where="hosts")


def recipe(**data: Any) -> dict[str, Any]:
    return {"run": {}, "data": {"global_batch": 24, **data}, "optimizer": {}}


def test_a_fixed_batch_is_computed_in_more_parts_on_fewer_ranks() -> None:
    batch = elastic_batch(recipe(micro_batches=2), range_=ElasticRange(least=1, most=4))
    assert batch is not None
    overrides = {ranks: batch.overrides(ranks=ranks, most=4) for ranks in (4, 3, 2, 1)}
    assert overrides == {
        4: (),
        3: ("--set", "data.micro_batches=4"),
        2: ("--set", "data.micro_batches=4"),
        1: ("--set", "data.micro_batches=8"),
    }
    assert "the global batch (24) and the learning rate stay" in batch.describe(ranks=2, most=4)


def test_with_a_batch_per_rank_the_global_batch_changes_and_the_rate_follows_the_recipes_rule() -> None:
    document = recipe()
    document["run"]["elastic_batch"] = "per-rank"
    document["optimizer"]["lr_scaling"] = "sqrt"
    batch = elastic_batch(document, range_=ElasticRange(least=1, most=4))
    assert batch is not None
    assert batch.overrides(ranks=3, most=4) == ("--set", "data.global_batch=18")
    said = batch.describe(ranks=3, most=4)
    assert "6 samples per rank, so the global batch is 18" in said
    assert "follows it (optimizer.lr_scaling = 'sqrt')" in said
    document["optimizer"] = {}
    batch = elastic_batch(document, range_=ElasticRange(least=1, most=4))
    assert batch is not None
    assert "the learning rate stays" in batch.describe(ranks=3, most=4)
    with pytest.raises(UsageError, match="a multiple of 5"):
        elastic_batch(document, range_=ElasticRange(least=1, most=5))


def test_a_recipe_for_one_number_of_ranks_is_refused() -> None:
    document = recipe()
    document["run"]["ranks"] = 4
    with pytest.raises(UsageError, match=r"remove run\.ranks"):
        elastic_batch(document, range_=TWO_TO_EIGHT)


def test_ranks_come_in_copies_of_a_split_model() -> None:
    assert ranks_of_one_model({}) == 1
    assert ranks_of_one_model({"parallel": {"tensor": 2, "pipeline": 3}}) == 6


def test_another_number_of_slots_is_found_once_and_a_file_that_is_being_written_is_read_again() -> None:
    answers = iter([(4, "a"), LaunchError("half a file"), (2, "the file gives 2 slots"), (4, "c")])

    def find() -> tuple[int, str]:
        found = next(answers)
        if isinstance(found, LaunchError):
            raise found
        return found

    watch = ResizeWatch(ranks=4, find=find)
    watch.begin()
    until_s = time.monotonic() + 100
    while watch.wanted() is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert watch.wanted() == "the file gives 2 slots: from 4 to 2 ranks"
    watch.end()
    assert next(answers) == (4, "c")  # it has looked no further


GONE = b"hpctrain: rank 1 on vm is gone"


def watch_of(directory: Path, *, keeps_state: bool, resize: ResizeWatch | None = None) -> AttemptWatch:
    return AttemptWatch(
        RunProgress(directory, checkpoints=directory / "checkpoints"),
        nodes=NodeWatch(["vm"], addresses={}, slurmd_port=6818),
        start_within_s=None,
        kill_after_s=4.0,
        training_begins=lambda _step, _at: None,
        resize=resize,
        keeps_state=keeps_state,
    )


def begin(watch: AttemptWatch, directory: Path) -> None:
    (directory / "starts.jsonl").write_text('{"time": 1795500000.0, "step": 5, "ranks": 2}\n')
    assert watch.must_end() is None


def test_ranks_that_are_left_are_ended_once_their_node_has_kept_the_state(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, keeps_state=True)
    begin(watch, tmp_path)
    watch.saw_line(GONE, None)
    assert watch.lost_at is not None
    assert watch.must_end() is None
    watch.saw_line(b"hpctrain: vm keeps the state after step 17, written in 12 ms", None)
    assert watch.must_end() is not None


def test_ranks_are_ended_even_if_no_node_says_that_it_has_kept_the_state(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, keeps_state=True)
    begin(watch, tmp_path)
    watch.saw_line(GONE, None)
    until_s = time.monotonic() + 100
    while watch.must_end() is None:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_what_ranks_report_past_mpirun_counts_like_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Notices() as notices:
        watch = AttemptWatch(
            RunProgress(tmp_path, checkpoints=tmp_path / "checkpoints"),
            nodes=NodeWatch(["vm"], addresses={}, slurmd_port=6818), start_within_s=None, kill_after_s=4.0,
            training_begins=lambda _step, _at: None, keeps_state=True, notices=notices,
        )  # fmt: skip
        watch.launched(os.getpid())
        begin(watch, tmp_path)
        monkeypatch.setenv(NOTICES_VARIABLE, notices.path)
        print_notice("rank 1 on vm is gone")
        print_notice("vm keeps the state after step 3, written in 1 ms")
        until_s = time.monotonic() + 100
        while (request := watch.must_end()) is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert request.kill_after_s < 1
    assert not Path(notices.path).exists()
    print_notice("nobody listens any more")


def test_a_rank_that_is_gone_without_another_line_is_a_lost_rank() -> None:
    kept = "hpctrain: vm keeps the state after step 17, written in 12 ms"
    found = classify(Evidence(exit_code=137, lines=[GONE.decode(), kept]))
    assert (found.cause, found.nodes, found.error) == (AttemptEnd.LOST_RANK, ("vm",), "")
    lines = ["Traceback (most recent call last):", "KeyError: 'x'", GONE.decode(), kept]
    assert classify(Evidence(exit_code=137, lines=lines)).cause is AttemptEnd.USER_ERROR


def test_the_ranks_are_asked_once_to_stop_for_another_number_of_ranks(tmp_path: Path) -> None:
    resize = ResizeWatch(ranks=2, find=lambda: (4, "more"))
    watch = watch_of(tmp_path, keeps_state=True, resize=resize)
    # Stands for mpirun: counts the signals that it gets.
    counts = 'trap "echo asked >> seen" USR1; touch ready; while :; do sleep 0.05; done'
    with subprocess.Popen(["sh", "-c", counts], cwd=tmp_path, start_new_session=True) as launcher:
        try:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            watch.launched(launcher.pid)
            while resize.wanted() is None:
                time.sleep(0.01)
            assert watch.must_end() is None
            assert watch.resized == ""  # nothing is trained yet
            begin(watch, tmp_path)
            while not (tmp_path / "seen").exists():
                time.sleep(0.01)
            for _ in range(3):
                assert watch.must_end() is None
            time.sleep(0.3)
            assert (tmp_path / "seen").read_text().split() == ["asked"]
            assert watch.resized == "more: from 2 to 4 ranks"
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)
