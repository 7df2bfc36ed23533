"""Checkpoints whose metadata somebody has changed, and sealed again with hashes that fit. Run in a process of its own
as `python -m tests.faults.checkpoint.fuzz DIRECTORY EXAMPLES`; prints one line of JSON.

Each is an error or loads; nothing else may happen: no other exception, not much time, not much memory (a limit on this
process), no code run, no file opened that is not the checkpoint's.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from hpctrain.checkpoint import Replicated, State, TensorShard, load, save
from hpctrain.checkpoint.format.metadata import SEAL_BYTES, Seal, decode_metadata, decode_seal, encode_seal
from hpctrain.checkpoint.loading.check_structure import content_places, hash_structure
from hpctrain.checkpoint.operations.maintenance import verify
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of

LIMIT_S = 20.0
MEMORY_BYTES = 512 << 20
NUM_RANKS = 3
RUNS_CODE = (
    "exec", "compile", "import", "marshal.loads", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec",
    "os.posix_spawn", "os.fork", "ctypes.dlopen", "socket.connect", "code.__new__",
)  # fmt: skip
TOUCHES = (
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link",
    "os.symlink", "os.chmod", "os.utime", "shutil.rmtree",
)  # fmt: skip

WATCHED: list[Path] = []  # the checkpoint that is being loaded, while it is
SEEN: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: what the interpreter does while a checkpoint is loaded."""
    if not WATCHED:
        return
    if event in RUNS_CODE:
        SEEN.append(f"{event} {arguments!r:.200}")
    elif event in TOUCHES and arguments and isinstance(arguments[0], str | bytes | os.PathLike):
        path = Path(os.fsdecode(arguments[0]))
        if path != WATCHED[0] and path.parent != WATCHED[0]:
            SEEN.append(f"{event} {path}")


def make_good(directory: Path, *, files: int) -> Path:
    def rank_main(world: World) -> None:
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(9, 50, generator=generator)
        state = State(
            items=[
                Replicated(name="weight", tensor=torch.randn(70, 41, generator=generator)),
                Replicated(name="bias", tensor=torch.randn(41, generator=generator).to(torch.bfloat16)),
                Replicated(name="step", tensor=torch.tensor(17)),
                Replicated(name="empty", tensor=torch.empty(0, 3)),
                TensorShard(
                    name="rows", tensor=whole[3 * world.rank : 3 * world.rank + 3], global_shape=(9, 50),
                    offset=(3 * world.rank, 0),
                ),
            ],
            document={"epoch": 3},
        )  # fmt: skip
        save(state, directory=directory, step=1, comm=world, files=files)

    run_threads(NUM_RANKS, rank_main, timeout_s=300)
    return directory / ("step-00000001" if files > 1 else "step-00000001.h5")


def main_of(path: Path) -> Path:
    return path / "data-00000.h5" if path.is_dir() else path


class Victim:
    """A good checkpoint, and a copy of it whose main file is written anew for each example."""

    def __init__(self, good: Path, place: Path) -> None:
        self.path = place / good.name
        shutil.copytree(good, self.path) if good.is_dir() else shutil.copy(good, self.path)
        self.main = main_of(self.path)
        self.content = main_of(good).read_bytes()
        self.seal = decode_seal(self.content[:SEAL_BYTES], file_bytes=len(self.content))
        begin = self.seal.metadata_offset
        self.text = self.content[begin : begin + self.seal.metadata_bytes]
        self.metadata: dict[str, Any] = json.loads(self.text)

    def write(self, data: bytes, *, change_seal: Callable[[Seal], bytes] = encode_seal) -> None:
        """Put other metadata at the end of the main file, and a seal that vouches for it."""
        content = bytearray(self.content + data)
        place, file_bytes = len(self.content), len(self.content) + len(data)
        structure_hash = self.seal.structure_hash
        try:
            decoded = decode_metadata(data, file_bytes=file_bytes, byte_order=sys.byteorder)
            self.main.write_bytes(content)
            fd = os.open(self.main, os.O_RDONLY)
            try:
                taken = [(0, SEAL_BYTES), (place, len(data)), *content_places(decoded)[0]]
                structure_hash = hash_structure(fd, taken=taken, file_bytes=file_bytes)
            finally:
                os.close(fd)
        except CheckpointError:
            pass  # it will be refused before that hash is looked at
        seal = Seal(
            metadata_offset=place, metadata_bytes=len(data), metadata_hash=hash_of(data),
            structure_hash=structure_hash, file_bytes=file_bytes,
        )  # fmt: skip
        content[:SEAL_BYTES] = change_seal(seal)
        self.main.write_bytes(content)


class Counts:
    loaded = 0
    refused = 0
    slowest_s = 0.0


def loads(path: Path) -> str:
    """What is wrong with it, as loading says; nothing when it loads."""
    try:
        load(path, comm=SerialWorld())
    except CheckpointError as error:
        return str(error)
    return ""


def verifies(path: Path) -> str:
    return "; ".join(verify(path, comm=SerialWorld())[0].damage)


def attempt(victim: Victim) -> bool:
    """Load and verify it: whether it is good. All that may come of it is an error of ours, soon."""
    wrong = []
    for action in (loads, verifies):
        begin_s = time.process_time()
        WATCHED.append(victim.path)
        try:
            wrong.append(action(victim.path))
        finally:
            WATCHED.clear()
        used_s = time.process_time() - begin_s
        Counts.slowest_s = max(Counts.slowest_s, used_s)
        assert used_s < LIMIT_S, used_s
        assert len(wrong[-1]) < 2000, wrong[-1]
        assert not SEEN, SEEN
    assert bool(wrong[0]) == bool(wrong[1]), wrong
    if wrong[0]:
        Counts.refused += 1
    else:
        Counts.loaded += 1
    return not wrong[0]


NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]

HOSTILE = st.one_of(
    st.sampled_from(
        [
            None, True, False, -1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, 1.5, float("nan"), float("inf"), "",
            "x" * 10_000, "../../../../etc/passwd", "/etc/passwd", "data-00001.h5/../../x", "data-00000.h5",
            "data-99999.h5", "/dev/zero", "\0", "\ud800", "__class__", "float32", "complex128", [], {}, [[]], NESTED,
            [0] * 33, [2**62] * 5, [0] * 100_000,
        ]
    ),
    st.integers(-(2**64), 2**64),
    st.integers(0, 20_000),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
)  # fmt: skip


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Down to a depth that our metadata never has: an earlier change may have put in a very deep list."""
    found = [path] if path else []
    if len(path) > 20:
        return found
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places_in(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            found += places_in(inner, (*path, key))
    return found


def of_its_own(value: Any) -> Any:
    """A copy, so that a later change inside it does not put it into itself; what is too deep to copy stays."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return value


def changed(metadata: dict[str, Any], changes: list[tuple[str, int, int, Any]]) -> dict[str, Any]:
    """Replace, remove, repeat, or take from elsewhere; places are counted in what is there then."""
    result = copy.deepcopy(metadata)
    for kind, where, other, hostile in changes:
        places = places_in(result)
        if not places:
            break
        *path, key = places[where % len(places)]
        parent: Any = result
        for step in path:
            parent = parent[step]
        if kind == "replace":
            parent[key] = of_its_own(hostile)
        elif kind == "remove":
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent[key:key] = [of_its_own(parent[key]) for _ in range(1 + other % 3)]
        elif kind == "add" and isinstance(parent, dict):
            parent[str(hostile)[:50]] = of_its_own(hostile)
        else:
            source: Any = result
            for step in places[other % len(places)]:
                source = source[step]
            parent[key] = of_its_own(source)
    return result


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["replace", "remove", "repeat", "elsewhere", "add"]),
        st.integers(0, 2000),
        st.integers(0, 2000),
        HOSTILE,
    ),
    min_size=1,
    max_size=4,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(0, 40), st.binary(max_size=30)), min_size=1, max_size=5
)


def run(directory: Path, examples: int) -> dict[str, Any]:
    victims = []
    for form, files in (("file", 1), ("folder", 3)):
        place = directory / form
        (place / "hostile").mkdir(parents=True)
        victims.append(Victim(make_good(place, files=files), place / "hostile"))
    check = settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @check
    @given(victim=st.sampled_from(victims), changes=CHANGES)
    def values(victim: Victim, changes: list[tuple[str, int, int, Any]]) -> None:
        victim.write(json.dumps(changed(victim.metadata, changes)).encode())
        attempt(victim)

    @check
    @given(victim=st.sampled_from(victims), edits=EDITS)
    def text(victim: Victim, edits: list[tuple[int, int, bytes]]) -> None:
        data = bytearray(victim.text.rstrip())
        for place, length, replacement in edits:
            begin = place % len(data) if data else 0
            data[begin : begin + length] = replacement
        victim.write(bytes(data))
        attempt(victim)

    @check
    @given(victim=st.sampled_from(victims), changes=CHANGES)
    def seals(victim: Victim, changes: list[tuple[str, int, int, Any]]) -> None:
        def change(seal: Seal) -> bytes:
            magic, line = encode_seal(seal).split(b"\n", 2)[:2]
            data = magic + b"\n" + json.dumps(changed(json.loads(line), changes)).encode() + b"\n"
            return (data + hash_of(data).encode() + b"\n").ljust(SEAL_BYTES, b"\0")[:SEAL_BYTES]

        victim.write(victim.text, change_seal=change)
        attempt(victim)

    for victim in victims:  # what is imported and remembered at the first time
        victim.write(b"{}")
        assert not attempt(victim)
        victim.write(victim.text)
        assert attempt(victim)
    sys.addaudithook(watch)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    found = {}
    for name, trial in (("values", values), ("text", text), ("seals", seals)):
        before = (Counts.loaded, Counts.refused)
        trial()
        found[name] = {"loaded": Counts.loaded - before[0], "refused": Counts.refused - before[1]}
    # The watching itself: it sees what it should.
    WATCHED.append(directory)
    Path("/etc/hostname").exists() and open("/etc/hostname").close()
    eval("1 + 1")
    WATCHED.clear()
    return {**found, "slowest_s": Counts.slowest_s, "watch_sees": [line.split()[0] for line in SEEN]}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
