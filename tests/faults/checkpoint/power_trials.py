"""Power losses: after each, the newest checkpoint is the last that was reported, or a newer one, and whole."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm.backends.serial_world import SerialWorld
from tests.faults.checkpoint.mount_trial import Trial
from tests.faults.checkpoint.power_loss import states_after, write_out
from tests.faults.checkpoint.process_ranks import in_a_fork
from tests.faults.checkpoint.saves import (
    NUM_RANKS,
    WAYS,
    newest_step,
    save_step,
)


def power_loss(trial: Trial, count: int) -> dict[str, Any]:
    """After any operation the power fails, and what was not flushed is lost, all of it or some: the newest
    reported checkpoint is there, or a newer one, and nothing that looks finished is torn."""
    # A file, a folder, a file in the folder's place, a folder in its place and in that of a folder, a file.
    steps = [(1, WAYS[0]), (2, WAYS[3]), (2, WAYS[1]), (2, WAYS[2]), (2, WAYS[3]), (3, WAYS[0])]
    num_elems = 20_000  # all that the disk holds is written and read again for each case
    place = trial.nodes.shared / "run" / "checkpoints"
    mount = trial.nodes.mounts[0]
    mount.fault(trace=True)

    def rank_main(world: Any) -> None:
        for number, (step, way) in enumerate(steps):
            # Only one is kept: deleting it a moment too soon would leave none.
            save_step(step, directory=place, comm=world, way=way, keep=1, num_elems=num_elems)
            if world.rank == 0:
                (trial.nodes.shared / f"reported-{step}-{number}").touch()

    ended = trial.nodes.start_ranks(rank_main, num_ranks=NUM_RANKS, one_node=True).wait()
    assert [each.code for each in ended] == [0] * NUM_RANKS, ended
    events = mount.ask(trace=True)["trace"]
    mount.fault()
    return in_a_fork(lambda: check_power_loss(events, num_elems=num_elems, samples=count))


def check_power_loss(events: list[dict[str, Any]], *, num_elems: int, samples: int) -> dict[str, Any]:
    outcomes = Counter[str]()
    with TemporaryDirectory() as folder:
        for number, (events_before, found) in enumerate(states_after(events, samples=samples)):
            created = [e["path"] for e in events[:events_before] if e["operation"] == "create"]
            reported = max(
                [int(path.split("-")[1]) for path in created if path.startswith("/reported-")], default=0
            )
            place = Path(folder) / str(number)
            place.mkdir()
            write_out(found, place)
            checkpoints = place / "run" / "checkpoints"
            newest = newest_step(checkpoints, num_elems=num_elems)
            for path in finished_newest_first(checkpoints)[1:]:
                assert not verify(path, comm=SerialWorld())[0].damage, (path, number)
            operation = events[events_before - 1]
            assert reported <= newest <= reported + 1, (
                reported,
                newest,
                operation["operation"],
                events_before,
            )
            outcomes[f"{newest - reported}"] += 1
            shutil.rmtree(place)
    return {
        "events": len(events),
        "outcomes": dict(outcomes),
        "operations": Counter(e["operation"] for e in events),
    }
