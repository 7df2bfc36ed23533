"""Opens one dataset on all ranks: the manifest is read once per node, and each shard's file is checked by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.comm import World, agreed, broadcast_json, check_same
from hpctrain.data.format.manifest import Manifest, read_manifest
from hpctrain.data.reading.dataset import Dataset, Verify
from hpctrain.errors import DataError


def open_together(
    world: World,
    directory: Path,
    *,
    reads_manifest: bool,
    verify: Verify | str = Verify.SIZES,
    **options: Any,
) -> Dataset:
    """Opens the dataset in `directory` on every rank. Collective. Raises the same DataError on every rank.

    reads_manifest: this rank reads the manifest's file, and compares it with rank 0's, which all ranks use: true on
    rank 0 and on one rank of every node, so that a node that sees another dataset under this name is found.
    verify: see `Verify`. Rank r checks the shards r, r + N, ... of N ranks, so the shards are on a filesystem that all
    nodes share; copies on the nodes' own storage are checked when they are first read.
    options: of `Dataset.open`.
    Cost on the shared filesystem: one read of the manifest for each node, and one look-up or opening of each shard.
    """

    path = str(directory.absolute())
    # A rank that was started in another folder may see another dataset.
    reads = broadcast_json(world, path) != path or reads_manifest or world.rank == 0
    mine = agreed(world, lambda: read_manifest(directory) if reads else None, os_error=DataError)
    manifest = Manifest.model_validate(
        broadcast_json(world, mine.model_dump(mode="json") if mine is not None and world.rank == 0 else None)
    )
    check_same(
        world, name=f"the content of {directory}", value=(mine or manifest).fingerprint, error=DataError
    )

    def open_files() -> Dataset:
        dataset = Dataset(directory, manifest=manifest, **options)
        dataset.check_files(range(world.rank, len(manifest.shards), world.num_ranks), verify=verify)
        return dataset

    return agreed(world, open_files, os_error=DataError)
