"""What a rank notes after each step is read by others only if it is whole and of the step that is asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from hpctrain.train.loop.state_keeper import StepNotes


def notes(number: float) -> dict[str, torch.Tensor]:
    return {
        "generator/torch": torch.arange(13, dtype=torch.uint8) + int(number),
        "generator/python": torch.tensor([3, int(number)], dtype=torch.int64),
        "buffer/count": torch.tensor(int(number)),
        "buffer/mean": torch.full((2, 3), number, dtype=torch.float64).t(),
        "buffer/none": torch.empty(0),
        "buffer/flag": torch.tensor([True, False]),
    }


def test_the_last_two_steps_can_be_read_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "rank-00003"
    mine = StepNotes(path, tensors=notes(0))
    for step in range(5, 9):
        mine.write(step, notes(step))
    for step in (7, 8):
        found = StepNotes.read(path, step=step, like=notes(0))
        assert found is not None
        assert found.keys() == notes(step).keys()
        for name, expected in notes(step).items():
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected), name
    assert StepNotes.read(path, step=6, like=notes(0)) is None
    assert StepNotes.read(path, step=9, like=notes(0)) is None


def test_notes_of_another_layout_or_none_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000"
    StepNotes(path, tensors=notes(0)).write(4, notes(4))
    other = {**notes(0), "buffer/mean": torch.zeros(9, 9)}
    assert StepNotes.read(path, step=4, like=other) is None
    assert StepNotes.read(tmp_path / "rank-00001", step=4, like=notes(0)) is None


def test_a_rank_that_ends_by_itself_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000"
    mine = StepNotes(path, tensors=notes(0))
    assert not StepNotes.has_left(path)
    mine.leaves()
    assert StepNotes.has_left(path)
    assert not StepNotes.has_left(tmp_path / "nobody")
