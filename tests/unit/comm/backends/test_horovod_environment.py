"""Horovod's own two-level sums: how they are asked for, and when they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.comm.backends.running_horovod import (
    HorovodBuild,
    apply_settings,
    nccl_asked,
    nccl_in_effect,
    why_no_nccl,
)
from hpctrain.topology import Topology

TWO_BY_TWO = Topology.from_node_names(["a", "a", "b", "b"])
BUILD = HorovodBuild(nccl=True, mpi=True, nccl_asked="nccl-torus")


@pytest.mark.parametrize("algorithm", ["nccl-hierarchical", "nccl-torus"])
def test_an_algorithm_of_nccl_is_switched_on_alone(algorithm: str) -> None:
    environ = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_TORUS_ALLREDUCE": "1"}
    apply_settings(environ, algorithm=algorithm)
    assert nccl_asked(environ) == algorithm
    assert sorted(environ[name] for name in environ if name.endswith("_ALLREDUCE")) == ["0", "1"]


def test_another_algorithm_leaves_the_users_variables() -> None:
    environ = {"HOROVOD_TORUS_ALLREDUCE": "1"}
    apply_settings(environ, algorithm="flat")
    assert environ["HOROVOD_TORUS_ALLREDUCE"] == "1"
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE" not in environ
    assert nccl_asked(environ) == "nccl-torus"


def test_variables_that_horovod_takes_for_no_ask_for_nothing() -> None:
    for value in ("0", "", "yes", "-1"):
        assert nccl_asked({"HOROVOD_TORUS_ALLREDUCE": value}) is None


def test_it_runs_on_several_nodes_of_equal_size_with_nccl_on_gpus() -> None:
    assert why_no_nccl("nccl-torus", build=BUILD, topology=TWO_BY_TWO, device_type="cuda") is None
    assert nccl_in_effect(BUILD, topology=TWO_BY_TWO, device_type="cuda") == "nccl-torus"


@pytest.mark.parametrize(
    ("build", "names", "device_type", "reason"),
    [
        (None, "aabb", "cuda", "this run uses another backend"),
        (replace(BUILD, nccl=False), "aabb", "cuda", "built without NCCL"),
        (BUILD, "aabb", "cpu", "device is cpu"),
        (BUILD, "aaaa", "cuda", "on one node"),
        (BUILD, "aaab", "cuda", "2 nodes with 3 and 1 ranks"),
        (replace(BUILD, nccl_asked=None), "aabb", "cuda", "started without it"),
        (replace(BUILD, nccl_asked="nccl-hierarchical"), "aabb", "cuda", "started with nccl-hierarchical"),
    ],
)
def test_where_it_cannot_run_a_reason_is_given(
    build: HorovodBuild | None, names: str, device_type: str, reason: str
) -> None:
    topology = Topology.from_node_names(list(names))
    found = why_no_nccl("nccl-torus", build=build, topology=topology, device_type=device_type)
    assert found is not None
    assert reason in found


def test_emulated_nodes_and_gloo_cannot_run_it() -> None:
    emulated = Topology.from_node_names(["a", "b"], emulated=True)
    assert "emulated" in str(why_no_nccl("nccl-torus", build=BUILD, topology=emulated, device_type="cuda"))
    gloo = replace(BUILD, mpi=False, nccl_asked="nccl-hierarchical")
    assert "Gloo" in str(
        why_no_nccl("nccl-hierarchical", build=gloo, topology=TWO_BY_TWO, device_type="cuda")
    )


def test_what_is_asked_for_and_cannot_run_is_not_in_effect() -> None:
    for build, device_type in ((BUILD, "cpu"), (None, "cuda"), (replace(BUILD, nccl=False), "cuda")):
        assert nccl_in_effect(build, topology=TWO_BY_TWO, device_type=device_type) is None
