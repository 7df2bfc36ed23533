"""Replicas that differ, under real mpirun: buffers are saved as rank 0's, drifted parameters are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.data import pack_arrays
from tests.ranks.checkpoint import replica_cases as cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each rank found."""
    where = tmp_path_factory.mktemp("replicas")
    images, labels = load_digits(return_X_y=True)
    fields = {
        "image": images.reshape(-1, 1, 8, 8).astype(np.float32), "label": labels.astype(np.int64),
        "id": np.arange(len(labels)),
    }  # fmt: skip
    pack_arrays(where / "data", fields)
    return {n: run_ranks(n, cases.everything, str(where), timeout_s=800).outputs for n in (2, 3)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_own_loop_saves_rank_0s_buffers_whatever_the_way(
    outputs: dict[int, list[dict[str, Any]]], num_ranks: int
) -> None:
    for rank, found in enumerate(output["buffers"] for output in outputs[num_ranks]):
        # Mean and variance of four layers; nothing was made the same by the save.
        assert found["different"] == (8 if rank else 0)
        assert found["touched"] == []
        ways = ("direct", "mpio", "folder", "background", "two tiers")
        assert found["wrong"] == {way: [] for way in ways}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_parameter_that_drifted_is_named_on_all_ranks(
    outputs: dict[int, list[dict[str, Any]]], num_ranks: int
) -> None:
    for found in (output["drift"] for output in outputs[num_ranks]):
        assert found["same"] == found["off"] == found["rank0"] == [""] * num_ranks
        for how in ("sampled", "full", "background"):
            (text,) = set(found[how])
            assert f"differ from rank 0's: '2.weight' on rank {num_ranks - 1} by up to 0.25." in text
            assert ("A sample was compared" in text) == (how != "full")
        (text,) = set(found["one element, full"])
        assert f"'2.weight' on rank {num_ranks - 1} by up to " in text
        (text,) = set(found["statistics"])
        assert "'1.num_batches_tracked' on rank" in text
        assert "and 9 more tensors" in text
        assert ("its own copy may be the wrong one" in text) == (num_ranks > 2)
        (text,) = set(found["settings"])
        assert text.startswith("replica_check must be the same on every rank")
        assert found["note"][0].endswith(
            "WARNING: replicated tensors differ between ranks, rank 0's are saved"
        )
        assert found["wrong"] == []
        assert found["saved"] == [f"step-{step:08}.h5" for step in (1, 3, 4)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_run_resumes_as_if_never_stopped_and_ends_where_a_parameter_drifts(
    outputs: dict[int, list[dict[str, Any]]], num_ranks: int
) -> None:
    for found in (output["training"] for output in outputs[num_ranks]):
        assert found["same"]
        assert found["resumed_from"].endswith("step-00000008.h5")
        (text,) = set(found["drift"])
        assert "'model/1.bias' on rank 1 by up to 0.5" in text
        (text,) = set(found["in step"])
        assert f"'1.bias' {'on rank 1' if num_ranks > 2 else 'between ranks 0-1'} by up to 0.5" in text
        assert found["left"] == ["step-00000005.h5"]
