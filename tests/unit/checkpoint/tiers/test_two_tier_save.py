"""Two tiers with ranks as threads: each node has a directory of its own that stands for its disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hpctrain.checkpoint
from hpctrain.checkpoint import load_newest_good
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.checkpoint.saving.background import HostBuffers
from hpctrain.checkpoint.saving.save import SaveOptions, SaveResult
from hpctrain.checkpoint.tiers.node_store import Held
from hpctrain.checkpoint.tiers.partner_copy import Offer
from hpctrain.checkpoint.tiers.recover import Recovered, plan_recovery, recover
from hpctrain.checkpoint.tiers.two_tier_save import Tiers
from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.topology import Topology
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors


class Machines:
    """Nodes with `ranks_by_node[k]` ranks each; node k's disk is the folder `disk-<names[k]>`."""

    def __init__(self, directory: Path, *ranks_per_node: int, names: str = "abcdefgh") -> None:
        self.directory = directory
        self.shared = directory / "shared"
        of_rank = [name for name, ranks in zip(names, ranks_per_node, strict=False) for _ in range(ranks)]
        self.topology = Topology.from_node_names([f"node/{name}" for name in of_rank])
        self._disks = [directory / f"disk-{name}" for name in of_rank]

    def run(self, function: Callable[[ThreadsWorld, Tiers], Any], **options: Any) -> list[Any]:
        def rank_main(world: ThreadsWorld) -> Any:
            tiers = Tiers.open(
                local=self._disks[world.rank],
                shared=self.shared,
                topology=self.topology,
                comm=world,
                **options,
            )
            try:
                return function(world, tiers)
            finally:
                world.barrier()
                tiers.close()

        return run_threads(self.topology.num_ranks, rank_main)

    def disk(self, name: str) -> Path:
        return self.directory / f"disk-{name}"

    def held(self, name: str, kind: str) -> list[str]:
        return sorted(path.name for path in self.disk(name).glob(f"*/*/{kind}/step-*") if path.is_dir())


def save(world: ThreadsWorld, tiers: Tiers, *, step: int, **options: Any) -> SaveResult:
    state = state_of(world.rank, world.num_ranks)
    return tiers.begin_save(state, step=step, comm=world, options=SaveOptions(**options)).finish()


def save_locally(world: ThreadsWorld, tiers: Tiers, *, step: int) -> None:
    """As `save`, killed when partner and local disk have it, before the commit in the shared folder."""
    saving = tiers.begin_save(state_of(world.rank, world.num_ranks), step=step, comm=world)
    while saving._phase is None or saving._phase.name != "draining to the shared folder":
        saving.advance()
    assert saving.ready()


def check_loads(shared: Path, *, step: int) -> None:
    def loads(world: ThreadsWorld) -> None:
        restored = load_newest_good(shared, comm=world)
        assert restored is not None
        assert restored.checkpoint.step == step
        assert not restored.rejected
        for name, tensor in whole_tensors().items():
            assert same_bits(restored.tensors[name], tensor), name

    run_threads(1, loads)


def recovered(machines: Machines) -> Recovered:
    results = machines.run(lambda world, tiers: recover(tiers, comm=world))
    assert all(result == results[0] for result in results)
    return results[0]


def test_a_save_reaches_the_shared_folder_and_leaves_each_file_on_two_nodes(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 2, 1, 1)
    results = machines.run(lambda world, tiers: [save(world, tiers, step=step) for step in (10, 20)])
    shared = machines.shared / "step-00000020"
    assert {result[1].path for result in results} == {shared}
    assert results[0][1].bytes == sum(path.stat().st_size for path in shared.iterdir())
    assert "WARNING" not in results[0][1].note
    assert sorted(path.name for path in machines.shared.iterdir()) == ["step-00000010", "step-00000020"]
    for number, (name, after) in enumerate(("ab", "bc", "ca")):
        # One step stays on the nodes, and it is byte for byte what was drained.
        assert machines.held(name, "own") == ["step-00000020"]
        assert machines.held(after, "partner") == ["step-00000020"]
        drained = shared / f"data-{number:05d}.h5"
        (own,) = machines.disk(name).glob("*/*/own/step-00000020/*")
        (partner,) = machines.disk(after).glob("*/*/partner/step-00000020/*")
        assert own.name == partner.name == drained.name
        assert own.read_bytes() == partner.read_bytes() == drained.read_bytes()
    check_loads(machines.shared, step=20)


def test_training_may_go_on_while_a_save_is_copied_in_the_background(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 2, 1)

    def case(world: ThreadsWorld, tiers: Tiers) -> Path:
        buffers, state = HostBuffers(), state_of(world.rank, world.num_ranks)
        with ThreadPoolExecutor(1) as executor:
            saving = tiers.begin_save(state, step=5, comm=world, buffers=buffers, executor=executor)
            for item in state.items:
                item.tensor.zero_()  # the next step has changed everything
            return saving.finish().path

    machines.run(case)
    check_loads(machines.shared, step=5)


def test_the_old_names_of_a_save_warn_and_do_the_same(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"Tiers\.begin_save"):
        old = hpctrain.checkpoint.TwoTier  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="SaveResult"):
        assert hpctrain.checkpoint.Saved is SaveResult  # type: ignore[attr-defined]

    def case(world: ThreadsWorld, tiers: Tiers) -> SaveResult:
        result: SaveResult = old.begin(state_of(world.rank, 2), tiers=tiers, step=5, comm=world).finish()
        return result

    (result, _) = Machines(tmp_path, 1, 1).run(case)
    check_loads(tmp_path / "shared", step=5)
    with pytest.warns(DeprecationWarning, match="on_saved"):
        assert result.result is result
    with pytest.warns(DeprecationWarning, match="seconds"):
        assert result.write_s == result.seconds


def test_retention_holds_in_the_shared_folder(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    keep = Retention(last=2)
    machines.run(
        lambda world, tiers: [save(world, tiers, step=step, keep=keep) for step in (1, 2, 3)], keep_local=2
    )
    assert sorted(path.name for path in machines.shared.iterdir()) == ["step-00000002", "step-00000003"]
    assert machines.held("a", "own") == machines.held("a", "partner") == ["step-00000002", "step-00000003"]


def test_one_node_needs_no_partner(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 2)
    machines.run(save_locally_at_7)
    assert machines.held("a", "partner") == []
    assert recovered(machines).step == 7
    check_loads(machines.shared, step=7)


def save_locally_at_7(world: ThreadsWorld, tiers: Tiers) -> None:
    save_locally(world, tiers, step=7)


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_whichever_node_is_lost_what_was_not_drained_is_recovered_on_fewer_nodes(
    tmp_path: Path, lost: str
) -> None:
    machines = Machines(tmp_path, 1, 2, 1)
    machines.run(lambda world, tiers: save(world, tiers, step=3))
    machines.run(save_locally_at_7)
    check_loads(machines.shared, step=3)
    shutil.rmtree(machines.disk(lost))
    left = "".join(name for name in "abc" if name != lost)
    found = recovered(Machines(tmp_path, 1, 1, names=left))
    assert (found.step, found.path, found.notes) == (7, machines.shared / "step-00000007", ())
    check_loads(machines.shared, step=7)
    assert not list(machines.shared.glob(".*"))
    # The next start finds nothing newer than what is there.
    assert recovered(Machines(tmp_path, 1, 1, names=left)) == Recovered(path=None, step=None, notes=())


def test_two_lost_neighbours_lose_the_step_and_it_is_said(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1, 1)
    machines.run(lambda world, tiers: save(world, tiers, step=3))
    machines.run(save_locally_at_7)
    for name in "ab":
        shutil.rmtree(machines.disk(name))
    found = recovered(Machines(tmp_path, 1, 1, 1, names="cde"))
    assert found.path is None
    assert found.notes == (
        "step 7 is lost: of its 3 files no node holds number 0 any more, neither as its own nor as a partner's copy",
    )
    check_loads(machines.shared, step=3)


def test_a_damaged_copy_is_passed_over_for_the_partners(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    machines.run(save_locally_at_7)
    (own,) = machines.disk("b").glob("*/*/own/step-00000007/*")
    with open(own, "r+b") as file:
        file.seek(own.stat().st_size // 2)
        file.write(b"rotten")
    found = recovered(machines)
    assert found.step == 7
    assert len(found.notes) == 1
    assert f"{own} is damaged" in found.notes[0]
    check_loads(machines.shared, step=7)


def test_a_checkpoint_damaged_in_the_shared_folder_is_replaced_from_the_nodes(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    machines.run(lambda world, tiers: [save(world, tiers, step=step) for step in (5, 7)])
    os.truncate(machines.shared / "step-00000007" / "data-00000.h5", 5000)
    assert recovered(machines).step == 7
    check_loads(machines.shared, step=7)
    assert sorted(path.name for path in machines.shared.iterdir()) == ["step-00000005", "step-00000007"]


def test_when_all_copies_are_damaged_an_older_step_is_recovered(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    machines.run(lambda world, tiers: save_locally(world, tiers, step=6), keep_local=2)
    machines.run(save_locally_at_7, keep_local=2)
    for path in tmp_path.glob("disk-*/*/*/*/step-00000007/data-00001.h5"):
        os.truncate(path, 5000)
    found = recovered(machines)
    assert found.step == 6
    assert "step 7 is lost" in found.notes[0]
    check_loads(machines.shared, step=6)


def test_a_history_that_the_run_has_left_is_not_recovered(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    machines.run(save_locally_at_7)
    elsewhere = Machines(tmp_path, 1, 1, names="cd")  # goes on without the nodes a and b
    elsewhere.run(lambda world, tiers: save(world, tiers, step=5))
    assert recovered(machines) == Recovered(path=None, step=None, notes=())
    check_loads(machines.shared, step=5)
    # Going on from an older checkpoint on purpose: what the nodes hold of later steps is forgotten.
    machines.run(lambda world, tiers: save_locally(world, tiers, step=9))
    machines.run(lambda world, tiers: tiers.forget(from_step=6, comm=world))
    assert recovered(machines) == Recovered(path=None, step=None, notes=())


def test_a_new_save_of_a_step_replaces_what_the_nodes_hold_of_it(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    machines.run(save_locally_at_7)
    before = [path.read_bytes() for path in sorted(tmp_path.glob("disk-*/*/*/own/step-00000007.json"))]
    machines.run(save_locally_at_7)
    after = [path.read_bytes() for path in sorted(tmp_path.glob("disk-*/*/*/own/step-00000007.json"))]
    assert len(before) == len(after) == 2
    assert set(before).isdisjoint(after)
    assert recovered(machines).step == 7
    check_loads(machines.shared, step=7)


def test_a_shared_folder_that_cannot_be_written_is_an_error_on_all_ranks_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    machines = Machines(tmp_path, 2, 1)
    machines.shared.write_text("a file is in the way")

    def case(world: ThreadsWorld, tiers: Tiers) -> str:
        with pytest.raises(CheckpointError, match="cannot write checkpoints to") as raised:
            save(world, tiers, step=8)
        assert raised.value.agreed
        return str(raised.value)

    assert len(set(machines.run(case))) == 1
    machines.shared.unlink()
    # No partner has it, but all nodes are there.
    assert recovered(machines).step is None
    machines.shared.mkdir()


def test_a_partner_that_cannot_keep_a_copy_is_a_warning_and_the_save_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path, 1, 1)

    def case(world: ThreadsWorld, tiers: Tiers) -> str:
        shutil.rmtree(tiers.store.partner)
        if world.rank == 0:
            tiers.store.partner.write_text("a file is in the way")
        world.barrier()
        return save(world, tiers, step=8).note

    notes = machines.run(case)
    assert len(set(notes)) == 1
    assert "WARNING: no copy of data-00001.h5 on node node/a, after 0 of" in notes[0]
    assert notes[0].count("WARNING") == 1
    check_loads(machines.shared, step=8)


def test_arguments_are_checked_on_all_ranks(tmp_path: Path) -> None:
    machines = Machines(tmp_path, 1, 1)
    with pytest.raises(UsageError, match="keep_local = 0"):
        machines.run(lambda world, tiers: None, keep_local=0)
    (tmp_path / "disk-b").write_text("")
    with pytest.raises(UsageError, match="disk-b: this is not a directory"):
        machines.run(lambda world, tiers: None)


def held(
    step: int, file: int, *, num_files: int = 2, save_id: str = "a", unix_s: float = 50.0, digest: str = ""
) -> Held:
    offer = Offer(
        step=step, save_id=save_id, file=file, num_files=num_files, num_bytes=1, created_unix_s=unix_s
    )
    return Held(path=f"/{step}/{file}/{digest}", kind="own", offer=offer, digest=digest)


def test_recovery_takes_files_of_one_save_only_newest_first_and_hashed_copies_before_others() -> None:
    entries = [
        (0, held(5, 0)), (0, held(5, 1)),
        (0, held(9, 0, save_id="b")), (1, held(9, 1, save_id="c", unix_s=51.0)),  # two saves, none whole
        (0, held(7, 0)), (1, held(7, 0, digest="d")), (2, held(7, 1)),
        (0, held(3, 0)), (0, held(3, 1)),
        (0, held(8, 0, unix_s=10.0)), (0, held(8, 1, unix_s=10.0)),  # saved before what is in the shared folder
    ]  # fmt: skip
    candidates, notes = plan_recovery(entries, after_step=4, after_unix_s=20.0)
    assert [candidate.step for candidate in candidates] == [7, 5]
    assert [rank for rank, _ in candidates[0].holders[0]] == [1, 0]
    assert [rank for rank, _ in candidates[0].holders[1]] == [2]
    assert len(notes) == 2
    assert all(note.startswith("step 9 is lost") for note in notes)
