"""The ledger of attempts, and the effective training time from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.supervise.classify import AttemptEnd
from hpctrain.supervise.ledger import Attempt, Ledger, effective_time, read_attempts

FIRST = Attempt(
    number=1, job="12", allocation=0, nodes=("hpct0", "hpct1"), ranks=4, began=1000.0, training_began=1010.0,
    lost_at=1110.0, ended=1115.0, first_step=0, last_step=100, checkpoint_step=80, steps_gained=80, steps_lost=20,
    exit_code=137, cause=AttemptEnd.LOST_RANK, reason="rank 3 was killed", blamed=("hpct1",),
    decision="restart: lost rank",
)  # fmt: skip
SECOND = replace(
    FIRST, number=2, began=1120.0, training_began=1130.0, lost_at=None, ended=1230.0, first_step=80, last_step=180,
    checkpoint_step=180, steps_gained=100, steps_lost=0, exit_code=0, cause=AttemptEnd.FINISHED, blamed=(),
)  # fmt: skip


def test_what_is_written_is_read_back_and_each_line_is_one_json_object(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    running = replace(FIRST, training_began=None, lost_at=None, ended=None, cause=None, exit_code=None)
    ledger.add(running)
    assert read_attempts(tmp_path / "run") == (running,)
    ledger.replace(FIRST)
    ledger.add(SECOND)
    assert read_attempts(tmp_path / "run") == (FIRST, SECOND)
    assert Ledger(tmp_path / "run").attempts == [FIRST, SECOND]
    lines = ledger.path.read_text().splitlines()
    assert [json.loads(line)["cause"] for line in lines] == ["lost rank", "finished"]
    assert [path.name for path in ledger.path.parent.iterdir()] == ["attempts.jsonl"]


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text(json.dumps({**FIRST.to_json(), "temperature": 300}) + "\n")
    assert read_attempts(tmp_path) == (FIRST,)


@pytest.mark.parametrize("text", ["{", "[]\n", '{"number": 1}\n', '{"number": 1, "cause": "boredom"}\n'])
def test_a_file_that_is_no_ledger_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempts.jsonl").write_text(text)
    with pytest.raises(LaunchError, match=r"attempts\.jsonl is not one that"):
        Ledger(tmp_path)
    assert (tmp_path / "attempts.jsonl").read_text() == text


def test_no_ledger_means_no_attempts(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == ()


def test_a_ledger_that_cannot_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "other")
    ledger.path = tmp_path / "file" / "attempts.jsonl"
    ledger.add(FIRST)
    assert ledger.attempts == [FIRST]
    assert "WARNING: the ledger" in capsys.readouterr().err


def test_effective_time_counts_the_training_that_was_not_repeated() -> None:
    # 100 s of training until the loss, of which 20 of 100 steps were lost; then 100 s of which none was.
    found = effective_time([FIRST, SECOND])
    assert found.wall_s == 1230.0 - 1000.0
    assert found.effective_s == pytest.approx(80.0 + 100.0)
    assert found.share == pytest.approx(180 / 230)


def test_time_in_the_queue_does_not_count_and_an_attempt_without_training_does() -> None:
    requeued = replace(SECOND, allocation=1, began=9000.0, training_began=9010.0, ended=9110.0)
    failed = replace(FIRST, number=3, allocation=1, began=9120.0, training_began=None, ended=9130.0, first_step=None,
                     steps_gained=0, steps_lost=0)  # fmt: skip
    found = effective_time([FIRST, requeued, failed])
    assert found.wall_s == 115.0 + 110.0 + 10.0 + 10.0
    assert found.effective_s == pytest.approx(80.0 + 100.0)


def test_nothing_has_been_effective_before_the_first_end() -> None:
    assert effective_time([replace(FIRST, ended=None)]).share == 0.0
