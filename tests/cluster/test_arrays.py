"""The last task of a job array, whose job number is that of the whole array, is queued again alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.training_jobs import output, wait_for
from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

# Arrays of three tasks at a time, a core for each task; so often the last task of each is queued again.
ARRAYS, REQUEUES = 5, 10
# The last task stops; the others run until there is a file `end`.
_PROGRAM = f"""#!/bin/bash
((SLURM_PROCID == 0)) || exit 0
echo "$SLURM_JOB_ID" >>starts-"$SLURM_ARRAY_JOB_ID"-"$SLURM_ARRAY_TASK_ID"
if ((SLURM_ARRAY_TASK_ID == 2)); then
  ((${{SLURM_RESTART_COUNT:-0}} >= {REQUEUES})) || exit 75
else
  until [[ -e end ]]; do sleep 1; done
fi
"""


@pytest.mark.thorough  # test_slurm_commands.py: the first of two tasks, once
@pytest.mark.timeout(300 + 60 * REQUEUES)
def test_the_last_task_of_an_array_is_queued_again_and_no_other(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "hpctrain"
    program.parent.mkdir()
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    words = ["--array=0-2", "--nodes=1", "--ntasks-per-node=1", str(REPOSITORY / "slurm" / "seeds.sbatch")]
    environ = {"HPCTRAIN_ENVIRONMENT": str(tmp_path)}
    arrays = [cluster.submit([*words, "recipe.toml"], cwd=tmp_path, env=environ) for _ in range(ARRAYS)]

    def starts(array: int, task: int) -> list[str]:
        path = tmp_path / f"starts-{array}-{task}"
        return path.read_text().split() if path.exists() else []

    def all_have_started() -> bool:
        return all(len(starts(array, 2)) == REQUEUES + 1 for array in arrays)

    wait_for(all_have_started, folder=tmp_path, timeout_s=120 + 50 * REQUEUES)
    found = {(array, task): len(starts(array, task)) for array in arrays for task in (0, 1, 2)}
    (tmp_path / "end").touch()
    print(f"starts by array and task: {found}")
    assert set(starts(arrays[0], 2)) == {str(arrays[0])}  # its number is the array's
    assert all(count == (REQUEUES + 1 if task == 2 else 1) for (_, task), count in found.items())
    for array in arrays:
        for task in (0, 1, 2):
            asked = cluster.run(["scontrol", "show", "job", f"{array}_{task}"], timeout_s=300).stdout
            assert f"Restarts={REQUEUES if task == 2 else 0} " in asked, f"{asked}\n{output(tmp_path)}"
