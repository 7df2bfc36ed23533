"""What is printed at the deadline of the start about ranks of other nodes. The programs of the nodes are real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.lifetime import start_deadline


def at_deadline(nodes: list[list[int]], *, num_ranks: int, shared: Path) -> list[str]:
    """What the program prints on each node, of which the ranks in `nodes` wait, two on a node."""
    programs = []
    for waiting in nodes:
        folder = shared.parent / f"node-{waiting[0]}"
        folder.mkdir()
        for rank in waiting:
            (folder / f"rank-{rank}").write_text(str(rank % 2))
        found: dict[str, Any] = {
            "rank": waiting[0], "num_ranks": num_ranks, "host_size": 2, "launcher": "Slurm", "pid": os.getpid(),
            "variable": "NO_RANK_HAS_IT", "limit_s": 20.0, "timeout_s": 24.0, "folder": str(folder),
            "meeting": str(shared / "meeting"), "meeting_s": 1.5, "step": None,
        }  # fmt: skip
        command = [sys.executable, "-I", str(start_deadline.__file__), json.dumps(found)]
        programs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    return [program.communicate(timeout=300)[1] for program in programs]


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "text"),
    [
        (
            [[0, 1], [4, 5]], 6,
            "ranks 0, 1, 4, 5 wait. Absent, or started more than 1.5 s after rank 0: 2, 3",
        ),
        ([[0, 1], [2, 3]], 4, "all ranks wait: the network between their nodes does not connect them"),
        ([[0, 1]], 4, "wait (0, 1): the absent ranks are on other nodes, or the network"),
    ],
)  # fmt: skip
def test_ranks_of_other_nodes_are_named_once(
    tmp_path: Path, nodes: list[list[int]], num_ranks: int, text: str
) -> None:
    (tmp_path / "shared").mkdir()
    first, *others = at_deadline(nodes, num_ranks=num_ranks, shared=tmp_path / "shared")
    assert text in first
    assert others == [""] * len(others)
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_rank_that_has_ended_among_those_of_a_node_is_counted(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    first, second = at_deadline([[0, 1], [2]], num_ranks=4, shared=tmp_path / "shared")
    assert "1 of the 2 ranks of" in first
    assert "among local ranks 1; the ranks that wait are 2" in first
    assert "Absent, or started more than 1.5 s after rank 0: 3" in first
    assert second == ""
