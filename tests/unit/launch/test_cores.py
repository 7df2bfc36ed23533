"""A rank's share of the cores, from affinities as launchers set them and from files as the kernel shows them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from hpctrain.launch import cores
from hpctrain.launch.cores import RankCores, core_share, cpu_share, num_cpus_of_host, read_cores


def ranks(*affinities: str, threads: dict[int, int] | None = None, **limits: object) -> list[RankCores]:
    """Ranks of one host. affinities: as in Cpus_allowed_list. threads: hardware thread -> lowest one of its core."""
    found = []
    for affinity in affinities:
        cpus = cores._from_spans(affinity)
        owners = frozenset((threads or {}).get(cpu, cpu) for cpu in cpus)
        found.append(RankCores(host="a", cpus=cpus, cores=owners, **limits))  # type: ignore[arg-type]
    return found


# 8 cores of two hardware threads, numbered as Intel's and AMD's servers do: 0 and 8 are the first core.
SMT = {cpu: cpu % 8 for cpu in range(16)}
CASES = {
    # mpirun -n 8 --bind-to none, 8 cores
    "bind-to none": (ranks(*["0-7"] * 8), [1] * 8),
    "bind-to none, fewer ranks": (ranks(*["0-7"] * 3), [2] * 3),
    "bind-to none, one rank": (ranks("0-7"), [8]),
    # mpirun -n 2, and --map-by slot:PE=8
    "bind-to core": (ranks("0", "1"), [1, 1]),
    "bind-to core, eight cores each": (ranks(*[f"{8 * n}-{8 * n + 7}" for n in range(8)]), [8] * 8),
    # mpirun -n 4 --bind-to socket, two sockets of 8: mapped to both in turn
    "bind-to socket": (ranks("0-7", "8-15", "0-7", "8-15"), [4] * 4),
    "bind-to socket, uneven": (ranks("0-7", "8-15", "0-7"), [4, 8, 4]),
    # srun --cpus-per-task=4 on a node of 16
    "srun --cpus-per-task": (ranks("0-3", "4-7", "8-11", "12-15"), [4] * 4),
    # srun without binding (TaskPlugin=task/none): all of the node
    "srun, not bound": (ranks(*["0-15"] * 4), [4] * 4),
    # srun --overcommit: more ranks than cores
    "more ranks than cores": (ranks(*["0,1"] * 8), [1] * 8),
    "overlapping in part": (ranks("0-3", "2-5"), [3, 3]),
    # hyper-threads: 4 ranks not bound; srun -c 4 (CPUs are threads: 2 cores); --hint=nomultithread
    "hyper-threads, not bound": (ranks(*["0-15"] * 4, threads=SMT), [2] * 4),
    "hyper-threads, whole cores": (ranks("0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15", threads=SMT), [2] * 4),
    "hyper-threads, one of each core": (ranks("0-3", "4-7", threads=SMT), [4, 4]),
    "bound to single hyper-threads": (ranks("0", "8", "1", "9", threads=SMT), [1] * 4),
    # docker run --cpus=2.5 on 8 cores; a Kubernetes limit of half a core
    "a control group's limit": (ranks(*["0-7"] * 2, limit=5.0), [2, 2]),
    "a limit below a core": (ranks("0-7", limit=0.5), [1]),
    "a limit above the cores": (ranks("0-1", limit=64.0), [2]),
}  # fmt: skip


@pytest.mark.parametrize(("found", "threads"), CASES.values(), ids=CASES)
def test_a_rank_computes_with_the_cores_that_are_its_share(
    found: list[RankCores], threads: list[int]
) -> None:
    assert [max(1, math.floor(core_share(found, rank))) for rank in range(len(found))] == threads


def test_ranks_of_other_hosts_and_other_control_groups_take_nothing() -> None:
    here = ranks("0-3", "0-3", limit=2.0, limit_group="/one") + ranks("0-3", limit=2.0, limit_group="/two")
    there = RankCores(host="b", cpus=frozenset(range(4)), cores=frozenset(range(4)))
    shares = [core_share([*here, there], rank) for rank in range(4)]
    assert [float(share) for share in shares] == [1.0, 1.0, pytest.approx(4 / 3), 4.0]


def test_a_reduction_thread_may_run_on_a_second_hardware_thread() -> None:
    found = ranks("0,8", "1,9", threads=SMT)
    assert (core_share(found, 0), cpu_share(found, 0)) == (1, 2)


def test_a_host_has_the_hardware_threads_of_all_its_ranks_within_their_common_limit() -> None:
    assert num_cpus_of_host(ranks("0", "1", "2-3"), "a") == 4
    assert num_cpus_of_host(ranks("0-7", "0-7", limit=2.5), "a") == 2
    assert num_cpus_of_host(ranks("0-7", limit=2.0) + ranks("0-7"), "a") == 8


def test_what_ranks_tell_each_other_is_short_and_complete() -> None:
    one = RankCores(
        host="node1234",
        cpus=frozenset(range(256)),
        cores=frozenset(range(128)),
        limit=2.5,
        limit_group="/job",
    )
    text = json.dumps(one.to_json())
    assert len(text) < 60
    assert RankCores.from_json(json.loads(text)) == one
    odd = ranks("0,2-3,9")[0]
    assert RankCores.from_json(odd.to_json()) == odd


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


LIMITS = {
    "version 2": (
        {"proc/self/cgroup": "0::/jobs/one\n", "sys/fs/cgroup/jobs/one/cpu.max": "250000 100000\n"},
        (2.5, "/jobs/one"),
    ),
    "version 2, a tighter one above": (
        {
            "proc/self/cgroup": "0::/jobs/one/rank\n",
            "sys/fs/cgroup/jobs/one/rank/cpu.max": "max 100000\n",
            "sys/fs/cgroup/jobs/one/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/jobs/cpu.max": "200000 100000\n",
        },
        (2.0, "/jobs"),
    ),
    "version 2 in a container": (
        {"proc/self/cgroup": "0::/docker/4f2a\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        (1.5, "/"),
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:cpuset:/\n4:cpu,cpuacct:/jobs/one\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_period_us": "100000\n",
        },
        (3.0, "/jobs/one"),
    ),
    "version 1 without a limit": (
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        (None, ""),
    ),
    "nothing to read": ({}, (None, "")),
}


@pytest.mark.parametrize(("files", "expected"), LIMITS.values(), ids=LIMITS)
def test_the_tightest_limit_of_a_control_group_counts(
    tmp_path: Path, files: dict[str, str], expected: tuple[float | None, str]
) -> None:
    found = read_cores(write(tmp_path, files))
    assert (found.limit, found.limit_group) == expected


def test_hardware_threads_are_told_from_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 8, 9, 12})
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {path.format(cpu): f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in (0, 1, 8, 9)}
    found = read_cores(write(tmp_path, files))
    assert found.cpus == {0, 1, 8, 9, 12}
    assert found.cores == {0, 1, 12}  # of 12 the kernel says nothing
