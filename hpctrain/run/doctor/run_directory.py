"""Checks the run directory: write access, filesystem, striping, and space for the checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm import World, broadcast_json, describe_ranks
from hpctrain.run.doctor.finding import Facts, Finding, ok, problem, size_text, warning
from hpctrain.storage import filesystem_of

TOPIC = "run directory"
_LOW_SPACE_BYTES = 5 * 10**9
_IN_MEMORY = ("tmpfs", "ramfs")
_LFS_TIMEOUT_S = 5.0
_VISIBLE_WITHIN_S = 5.0
_MAX_RUNS = 100  # runs of a folder that are searched for checkpoints, at most


def read_run_directory(
    directory: Path, *, num_checkpoints: int = 3, checkpoint_bytes: int | None = None
) -> dict[str, Any]:
    """Returns facts about the filesystem of `directory`, which need not exist yet.

    The key `error` is set if the directory cannot be written.

    num_checkpoints: the number of checkpoints that are kept.
    checkpoint_bytes: the size of one checkpoint; None: the size of the newest checkpoint in the directory.
    """
    facts: dict[str, Any] = {"path": str(directory), "num_checkpoints": num_checkpoints}
    try:
        place = directory.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            return {**facts, "error": f"{place} is a file, not a directory"}
        # access() is not reliable on network filesystems: make a file.
        with tempfile.NamedTemporaryFile(dir=place, prefix=".hpctrain-doctor-"):
            pass
        filesystem = filesystem_of(place)
        existing = _checkpoints(place) if place == directory.absolute() else []
        return {
            **facts,
            "place": str(place),
            "kind": filesystem.kind,
            "options": list(filesystem.options),
            "free_bytes": shutil.disk_usage(place).free,
            "num_existing": len(existing),
            "checkpoint_bytes": checkpoint_bytes or (_size(existing[-1]) if existing else None),
            **(_stripes(place) if filesystem.is_lustre else {}),
        }
    except OSError as error:
        return {**facts, "error": f"cannot be written ({error.strerror})"}


def _checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints of the run in `directory`, or of the latest run in its subfolders, the newest last."""
    places = [directory / "checkpoints"]
    if not places[0].is_dir():
        runs = [path for path, _ in zip(directory.glob("*/checkpoints"), range(_MAX_RUNS), strict=False)]
        places = sorted(runs, key=lambda path: path.stat().st_mtime)[-1:]
    return [path for place in places for path in sorted(place.glob("step-*"))]


def _size(checkpoint: Path) -> int:
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files)


def _stripes(place: Path) -> dict[str, Any]:
    """Returns the number of servers over which new files in `place` are striped, from Lustre's own tool."""
    program = shutil.which("lfs")
    if program is None:
        return {"lfs": False}
    try:
        done = subprocess.run(
            [program, "getstripe", "-d", str(place)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_LFS_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {"lfs": True}
    return {"lfs": True, "stripe_count": stripe_count(done.stdout)}


def stripe_count(text: str) -> int | None:
    """Returns the stripe count in the output of `lfs getstripe -d`: -1 for all servers, None for no count. Pure."""
    found = re.search(r"stripe_count:\s*(-?\d+)", text)
    return int(found[1]) if found else None


def look_for_rank_0s_file(world: World, facts: dict[str, Any], *, checks: bool) -> None:
    """Checks whether this rank sees a file that rank 0 creates in the run directory. Collective.

    Stores the answer as `seen` in this rank's facts about the run directory.

    checks: whether this rank looks for the file; one rank per node suffices.
    """
    disk = facts["run_directory"]
    made = None
    if world.rank == 0 and "place" in disk:
        try:
            handle, made = tempfile.mkstemp(dir=disk["place"], prefix=".hpctrain-doctor-")
            os.close(handle)
        except OSError:
            made = None  # was possible a moment ago: the disk is full or the mount is gone, which others will find
    name = broadcast_json(world, made)
    if checks and name is not None and "place" in disk:
        disk["seen"] = _appears(Path(name))
    world.barrier()
    if made is not None:
        Path(made).unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            os.listdir(path.parent)  # queries the server instead of the attribute cache
            if path.exists():
                return True
        except OSError:
            pass  # not there, or a stale handle
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)


def judge_run_directory(facts: Facts) -> list[Finding]:
    """Returns the findings about the run directory as one rank sees it. Pure."""
    disk = facts["run_directory"]
    if "error" in disk:
        cure = "give another with --run-directory, or make it writable"
        return [problem(TOPIC, f"{disk['path']}: {disk['error']}", cure)]
    findings = [_space(disk)]
    options = disk.get("options", [])
    if disk["kind"].startswith("nfs") and "soft" in options:
        findings.append(
            warning(
                "filesystem",
                "NFS is mounted with the option soft: a server that is busy for a while makes writes fail",
                "ask the site for a mount with the option hard",
            )
        )
    if disk["kind"] == "lustre":
        findings.append(_striping(disk))
    return findings


def _space(disk: dict[str, Any]) -> Finding:
    text = f"{disk['path']}: {disk['kind']}, {size_text(disk['free_bytes'])} free"
    if disk["kind"] in _IN_MEMORY:
        return warning(
            TOPIC,
            text,
            "this filesystem is in memory: runs and checkpoints are lost at a restart of the machine",
        )
    size = disk.get("checkpoint_bytes")
    if size is None:
        if disk["free_bytes"] < _LOW_SPACE_BYTES:
            return warning(TOPIC, text, "checkpoints may not fit: free space, or give another directory")
        return ok(TOPIC, text)
    # While a save replaces the oldest checkpoint, there is one more than are kept.
    missing = max(1, disk["num_checkpoints"] + 1 - disk["num_existing"])
    needed = missing * size
    them = "checkpoint of {} needs {}" if missing == 1 else "checkpoints of {} need {}"
    text += f", {missing} more {them.format(size_text(size), size_text(needed))}"
    if disk["free_bytes"] < needed:
        cure = "free space, keep fewer (checkpoint.keep), or give another directory; quotas are not seen here"
        return (problem if disk["free_bytes"] < size else warning)(TOPIC, text, cure)
    return ok(TOPIC, text)


def _striping(disk: dict[str, Any]) -> Finding:
    count = disk.get("stripe_count")
    of_directory = "over all servers" if count == -1 else f"over {count or 'an unknown number of'} server(s)"
    if not disk["lfs"]:
        return warning(
            "striping",
            "lfs is not in PATH: checkpoints get the directory's stripe layout, often one server",
            "load the module that has lfs on the nodes, or set a layout by hand: lfs setstripe -c 8 -S 4M DIRECTORY",
        )
    return ok("striping", f"Lustre, {of_directory} by default; hpctrain sets each checkpoint's own")


def judge_visibility(facts_by_rank: Sequence[Facts]) -> list[Finding]:
    """Returns a problem if some nodes do not see a file that rank 0 creates in the run directory. Pure."""
    blind = [r for r, facts in enumerate(facts_by_rank) if facts["run_directory"].get("seen") is False]
    if not blind:
        return []
    hosts = list(dict.fromkeys(facts_by_rank[rank]["host"] for rank in blind))
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    path = facts_by_rank[0]["run_directory"]["path"]
    text = (
        f"{describe_ranks(blind)} ({shown}): a file that rank 0 made in {path} was not visible within "
        f"{_VISIBLE_WITHIN_S:.0f} s"
    )
    return [problem(TOPIC, text, "use a folder of a filesystem that all nodes share")]
