"""The measurements of each figure, and their sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.data import make_data
from benchmarks.data.child import REPOSITORY, Child, ReaderFailed
from benchmarks.data.figures import (
    cold_records,
    memory_records,
    order_records,
    speed_records,
    wait_records,
)
from benchmarks.data.kinds import kinds
from benchmarks.data.rounds import Method, cold_rounds, warm_rounds
from benchmarks.results_file import Record

OURS = ("ours", "ours-2-threads", "ours-map", "memmap", "memmap-buffer", "preadv")
PEERS = ("streaming", "webdataset")
COLD_OURS = ("ours", "memmap", "preadv")
KINDS = ("images", "volumes", "tokens")
COMPRESSED = {"gzip-in-order": 16, "gzip-shuffled": 1}  # samples a chunk
SEED = 20


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. share: part of the datasets' full sizes. kinds, compressed: datasets of figure 1.
    cold_rounds: 0 for none."""

    share: float = 1.0
    kinds: tuple[str, ...] = KINDS
    compressed: tuple[str, ...] = tuple(COMPRESSED)
    warm_rounds: int = 5
    cold_rounds: int = 2
    num_steps: int = 30
    step_s: float = 0.1
    memory_shares: tuple[float, ...] = (0.5, 1.0, 2.0)
    prefetch_bytes: int = 64 << 20
    cache_bytes: int = 64 << 20


FULL = Scale()
QUICK = replace(
    FULL, share=0.04, warm_rounds=1, cold_rounds=1, num_steps=5, step_s=0.02, memory_shares=(0.05,)
)

Say = Callable[[str], None]


def speeds(scratch: Path, scale: Scale, peers_python: Path, say: Say) -> tuple[list[Record], dict[str, str]]:
    """Measures figure 1, warm and cold. Returns its records and the peers' versions."""
    of, random = kinds(share=scale.share), Random(SEED)
    warm: dict[str, dict[str, list[float]]] = {}
    cold: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        ours, h5py, peers = (
            stack.enter_context(Child(python, module=f"benchmarks.data.{module}"))
            for python, module in (
                (Path(sys.executable), "ours"),
                (Path(sys.executable), "h5py_loader"),
                (peers_python, "peer_readers"),
            )
        )
        versions = peers.ask("versions", arguments={})
        for name in scale.kinds:
            kind, directory = of[name], scratch / name
            make_data.write_shards(kind, directory)
            for peer in PEERS:
                peers.ask("write", arguments={
                    "method": peer, "kind": asdict(kind), "directory": str(scratch / f"{name}-{peer}"),
                })  # fmt: skip

            def methods(names: tuple[str, ...], *, name: str = name) -> list[Method]:
                return [
                    *(Method(name=method, child=ours, directory=scratch / name) for method in names),
                    Method(name="h5py", child=h5py, directory=scratch / name),
                    *(Method(name=peer, child=peers, directory=scratch / f"{name}-{peer}") for peer in PEERS),
                ]

            warm[name] = warm_rounds(kind, methods(OURS), repeats=scale.warm_rounds, random=random)
            say(f"{name}, warm")
            if scale.cold_rounds:
                cold[name] = cold_rounds(
                    kind, methods(COLD_OURS), repeats=scale.cold_rounds, random=random, say=say
                )
                say(f"{name}, cold")
        for name in scale.compressed:
            directory = scratch / name
            make_data.write_compressed(of["gzip"], directory, chunk_samples=COMPRESSED[name])
            both = [
                Method(name="ours", child=ours, directory=directory),
                Method(name="zlib", child=ours, directory=directory, checks=False),
            ]
            warm[name] = warm_rounds(of["gzip"], both, repeats=scale.warm_rounds, random=random)
            say(f"{name}, warm")
    return [*speed_records(warm, of), *cold_records(cold)], versions


def waits(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 2: how long steps wait for their batches."""
    found = {}
    with Child(Path(sys.executable), module="benchmarks.data.ours") as ours:
        for name in ("images", "tokens"):
            _needs(scratch, name, scale)
            found[name] = ours.ask("step_waits", arguments={
                "directory": str(scratch / name), "batch": 64, "step_s": scale.step_s,
                "num_steps": scale.num_steps,
            })  # fmt: skip
    say("waits of the steps for their batches")
    return wait_records(found, step_s=scale.step_s, batch=64)


def costs(scratch: Path, scale: Scale, say: Say) -> list[Record]:
    """Measures figure 3: peak memory, and the cost of the order."""
    found: dict[str, list[dict[str, int]]] = {}
    for share in scale.memory_shares:
        directory = scratch / f"memory-{share:g}"
        make_data.write_shards(kinds(share=share)["images"], directory)
        for mode in ("auto", "read", "map"):
            settings = {
                "directory": str(directory), "batch": 64, "prefetch_bytes": scale.prefetch_bytes,
                "open_options": {"io": mode, "cache_bytes": scale.cache_bytes},
            }  # fmt: skip
            found.setdefault(mode, []).append(_measured_alone("benchmarks.data.memory", settings))
    say("memory")
    with Child(Path(sys.executable), module="benchmarks.data.ours") as ours:
        order = ours.ask("order_cost", arguments={
            "num_samples": 10**9, "num_ranks": 65_536, "batch": 64, "repeats": 200,
        })  # fmt: skip
    say("the order")
    memory = memory_records(found, prefetch_bytes=scale.prefetch_bytes, cache_bytes=scale.cache_bytes)
    return [*memory, *order_records(order)]


def _needs(scratch: Path, name: str, scale: Scale) -> None:
    if not (scratch / name).exists():
        make_data.write_shards(kinds(share=scale.share)[name], scratch / name)


def _measured_alone(module: str, settings: dict[str, Any]) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(settings)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ReaderFailed(f"{module}: {done.stderr[-2000:]}")
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer
