"""A session's bare sum: what runs for each name, told where it is not what was asked for."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce.algorithms import ALGORITHM_NAMES
from tests.sessions import session_over

# By layout: what runs where a two-level sum is asked for, and why not another.
LAYOUTS = {
    "a": ("flat", "1 node x 1 rank"),
    "aa": ("flat", "1 node x 2 ranks"),
    "ab": ("flat", "2 nodes x 1 rank"),
    "aabb": ("hierarchical-flat", "buffers of any size"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_name_sums_and_what_runs_instead_is_reported(layout: str) -> None:
    two_levels, why = LAYOUTS[layout]

    def case(world: World) -> dict[str, list[str]]:
        session = session_over(world, nodes=layout)
        notes = {}
        for name in ALGORITHM_NAMES:
            reduce, buffer = (
                session.reductions.in_place_sum(algorithm=name),
                torch.tensor([world.rank + 1.0, 10.0]),
            )
            reduce(buffer)
            ranks = len(layout)
            assert buffer.tolist() == [ranks * (ranks + 1) / 2, 10.0 * ranks], name
            notes[name] = list(session.notes)
            session.notes.clear()
        session.close()
        return notes

    for notes in run_threads(len(layout), case, timeout_s=300):
        assert notes.pop("auto") == notes.pop("flat") == []
        if two_levels == "hierarchical-flat":
            assert notes.pop("hierarchical-flat") == []
        for name, reported in notes.items():
            runs = two_levels if name.startswith("hierarchical") else "flat"
            (text,) = reported
            assert text.startswith(f"reduction: {name} was asked for, {runs} is used: ")
            if name.startswith("hierarchical"):
                assert why in text
