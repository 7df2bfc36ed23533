"""An elastic run on a real Slurm cluster: nodes are lost, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.supervise import AttemptEnd
from tests.cluster import Cluster
from tests.cluster.supervised_jobs import NODE_STORAGE, revive, submit
from tests.cluster.training_jobs import output, wait_for
from tests.faults.elastic_task import pack_numbered
from tests.faults.test_elastic import (
    assert_each_sample_once,
    assert_same_run,
    parts_of,
    trains,
    write_recipe,
)
from tests.runbook import find_shown
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches


def test_with_too_few_nodes_it_names_the_missing_ones_and_goes_on_when_they_are_back_or_ends_with_75(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, steps = tmp_path, 100000
    pack_numbered(folder / "data")
    write_recipe(folder, steps=steps, step_s=0.1, checkpoint=f'local = "/tmp/{NODE_STORAGE}"')
    options = ["--nodes=2", "--ntasks-per-node=1", "--no-requeue"]
    job = submit(cluster, folder, *options, supervise="--elastic 2:2 --elastic-wait-s 60")
    try:
        wait_for(trains(folder, attempt=1), folder=folder)
        lost = attempts(folder)[0].nodes[1]
        cluster.cut_link(lost)
        try:
            wait_for(lambda: "waiting up to 60 s for more" in output(folder), folder=folder)
        finally:
            cluster.mend_link(lost)
        line = find_shown(output(folder), "ranks are needed (--elastic", page="f12-elastic.md")
        assert f"missing: {lost}: " in line
        wait_for(trains(folder, attempt=2), folder=folder)
        before, after = attempts(folder)
        assert (before.ranks, after.ranks) == (2, 2)
        assert (before.cause, before.steps_lost) == (AttemptEnd.LOST_NODE, 0)
        cluster.cut_link(lost)
        try:
            ended = cluster.wait_for(job, timeout_s=300)
        finally:
            cluster.mend_link(lost)
        assert ended.exit_code == 75, output(folder)
        assert "after 60 s: ending with exit code 75" in output(folder)
    finally:
        cluster.run(["scancel", str(job)], timeout_s=300)
        for node in cluster.node_names:
            revive(cluster, node)


def test_it_goes_from_4_to_2_nodes_and_back_to_4_when_links_are_cut_and_mended(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, steps = tmp_path, 160
    pack_numbered(folder / "data")
    local = f'mode = "async"\nlocal = "/tmp/{NODE_STORAGE}"'
    write_recipe(folder, steps=steps, step_s=0.2, checkpoint=local, algorithm="ring")
    options = ["--nodes=4", "--ntasks-per-node=1"]
    job = submit(cluster, folder, *options, supervise="--elastic 2:4")
    lost = ("hpct2", "hpct3")
    try:
        wait_for(trains(folder, attempt=1), folder=folder)
        for node in lost:
            cluster.cut_link(node)
        try:
            wait_for(trains(folder, attempt=2), folder=folder)
        finally:
            for node in lost:
                cluster.mend_link(node)
        wait_for(lambda: attempts(folder)[-1].cause is AttemptEnd.FINISHED, folder=folder, timeout_s=600)
    finally:
        cluster.run(["scancel", str(job)], timeout_s=300)
        for node in cluster.node_names:
            revive(cluster, node)
    found = [attempt for attempt in attempts(folder) if attempt.first_step is not None]
    ranks = [attempt.ranks for attempt in found]
    # The nodes may answer again one after the other.
    assert ranks[0] == ranks[-1] == 4, output(folder)
    assert 2 in ranks
    assert found[0].cause is AttemptEnd.LOST_NODE
    assert {attempt.cause for attempt in found[1:-1]} == {AttemptEnd.RESIZED}
    assert "keeps the state after step" in output(folder)
    assert_each_sample_once(folder, steps=steps, redone=1)
    write_recipe(folder, steps=steps, step_s=0, directory="again", algorithm="ring", name="again.toml")
    ends = [*(stage.first_step for stage in found[1:]), steps]
    for stage, end in zip(found, ends, strict=True):
        srun = ["srun", f"--nodes={stage.ranks}", "--ntasks-per-node=1", "hpctrain", "train", "again.toml"]
        words = ["--set", f"run.steps={end}", "--set", f"data.micro_batches={parts_of(stage.ranks)}"]
        ended = cluster.run([*srun, *words], cwd=folder, timeout_s=300)
        assert ended.returncode == 0, ended.stderr
    assert_same_run(folder / "run", folder / "again", steps=steps)
