"""A rank that hangs is named, on a real Slurm cluster: stopped at a random moment, and all end before the limit."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.supervise import AttemptEnd
from tests.cluster import Cluster
from tests.cluster.supervised_jobs import prepare, submit, trains
from tests.cluster.training_jobs import output, wait_for
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches

TRIALS = min(int(os.environ.get("HPCTRAIN_TRIALS", "0")), 10)
TIMEOUT_S = 8.0
# The ordinary tests run beside other work.
NAMED_WITHIN_S = TIMEOUT_S + (5.0 if TRIALS else 30.0)
_ABSENT = re.compile(r"^did not come: (?P<who>.*)\n  (?P<what>.*)$", re.MULTILINE)


@pytest.mark.trials
@pytest.mark.thorough  # test_causes.py, once
@pytest.mark.timeout(120 + 60 * TRIALS)
def test_a_stopped_rank_is_named_with_its_host_before_the_limit_is_over(
    cluster: Cluster, folder: Path
) -> None:
    """`hpctrain supervise` starts the ranks anew for each trial."""
    prepare(folder, timeout_s=TIMEOUT_S)
    options = ["--nodes=4", "--ntasks-per-node=1"]
    job = submit(cluster, folder, *options, supervise="--node-budget 999 --max-restarts 999")
    draw, named_s = random.Random(), []
    try:
        for number in range(max(TRIALS, 1)):
            wait_for(trains(folder, attempt=number + 1), folder=folder)
            time.sleep(draw.uniform(0, 1))
            rank = draw.randrange(4)
            before = len(output(folder))
            os.kill(cluster.ranks(job)[rank], signal.SIGSTOP)
            began_s = time.monotonic()

            def named(before: int = before) -> list[re.Match[str]]:
                return list(_ABSENT.finditer(output(folder), before))

            wait_for(named, folder=folder)
            named_s.append(time.monotonic() - began_s)
            wait_for(lambda number=number: attempts(folder)[number].cause, folder=folder)
            attempt = attempts(folder)[number]
            host = attempt.nodes[rank]
            for line in named():  # one of each rank that waits
                assert line["who"] == f"rank {rank}", output(folder)
                assert line["what"].startswith(f"rank {rank} on {host} "), output(folder)
            assert (attempt.cause, attempt.blamed) == (AttemptEnd.HANG, (host,)), output(folder)
            assert named_s[-1] < NAMED_WITHIN_S
    finally:
        cluster.run(["scancel", str(job)], timeout_s=300)
    print(
        f"{len(named_s)} of {len(named_s)} stopped ranks named with their hosts, after {np.median(named_s):.1f} s "
        f"(median), at most {max(named_s):.1f} s; limit {TIMEOUT_S:g} s"
    )
