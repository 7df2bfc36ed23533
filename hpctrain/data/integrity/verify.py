"""Reads every byte of a dataset and compares it with the hashes of the manifest.

The blocks are divided among the ranks, without communication: the caller gathers the damage that each rank found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from hpctrain.data.format.manifest import MANIFEST_NAME, ShardEntry, read_manifest
from hpctrain.data.format.shard_check import HEADERS_DIFFER, HeadersDamaged
from hpctrain.data.format.token_windows import read_windows
from hpctrain.data.integrity.hashed_blocks import Block, BlockFile, blocks_of, samples_of
from hpctrain.data.order.epoch_order import rank_share
from hpctrain.errors import DataError

Progress = Callable[[int, int], None]
"""Called with (done, total) bytes of this rank's part."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged range of samples, numbered within the shard. field: None if the whole shard is damaged."""

    shard: str
    field: str | None
    first_sample: int
    last_sample: int
    reason: str

    def describe(self) -> str:
        """Returns shard, field, samples and reason as text, for messages."""
        where = "the whole shard" if self.field is None else f"field {self.field!r}"
        return f"{self.shard}, {where}, samples {self.first_sample} to {self.last_sample}: {self.reason}"

    def as_json(self) -> dict[str, str | int | None]:
        return asdict(self)


def verify(
    directory: Path | str, *, rank: int = 0, num_ranks: int = 1, progress: Progress | None = None
) -> list[Damage]:
    """Reads and hashes this rank's part of the blocks. Returns the damage found, in the order of the manifest.

    Each block is read by exactly one rank; a missing or unreadable shard is reported by every rank that has a
    block of it (see `merge_damage`). Not collective. Raises DataError if the manifest cannot be used.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    windows = read_windows(directory, manifest=manifest)
    starts = [0, *accumulate(entry.samples for entry in manifest.shards)]
    blocks = list(blocks_of(manifest))
    share = rank_share(0, len(blocks), rank=rank, num_ranks=num_ranks)
    mine = blocks[share.start : share.stop]
    total = sum(block.stop - block.start for block in mine)
    damages: list[Damage] = []
    done = 0
    by_shard: dict[int, list[Block]] = {}
    for block in mine:
        by_shard.setdefault(block.shard, []).append(block)
    for shard, shard_blocks in by_shard.items():
        entry = manifest.shards[shard]
        try:
            file = BlockFile(directory, manifest=manifest, entry=entry)
        except HeadersDamaged:
            damages.append(_whole_shard(entry, HEADERS_DIFFER))
            continue
        except (DataError, OSError) as error:
            damages.append(_whole_shard(entry, str(error)))
            continue
        try:
            # The rank that has the first block of a shard also checks its headers.
            first = shard_blocks[0]
            if first.start == 0 and first.field == next(iter(entry.fields)) and not file.structure_is_sound():
                damages.append(_whole_shard(entry, HEADERS_DIFFER))
            for block in shard_blocks:
                reason = file.fault_of(block)
                if reason is not None:
                    first_sample, last_sample = samples_of(
                        manifest,
                        block,
                        windows=None if windows is None else windows[starts[shard] : starts[shard + 1]],
                    )
                    damages.append(
                        Damage(
                            shard=entry.file,
                            field=block.field,
                            first_sample=first_sample,
                            last_sample=last_sample,
                            reason=reason,
                        )
                    )
                done += block.stop - block.start
                if progress is not None:
                    progress(done, total)
        finally:
            file.close()
    return merge_damage(damages)


def _whole_shard(entry: ShardEntry, reason: str) -> Damage:
    return Damage(shard=entry.file, field=None, first_sample=0, last_sample=entry.samples - 1, reason=reason)


def merge_damage(damages: list[Damage]) -> list[Damage]:
    """Joins adjacent and repeated ranges of the same shard, field and reason; keeps the order."""
    merged: list[Damage] = []
    for damage in damages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.shard, last.field, last.reason) == (damage.shard, damage.field, damage.reason)
            and damage.first_sample <= last.last_sample + 1
        ):
            merged[-1] = replace(last, last_sample=max(last.last_sample, damage.last_sample))
        else:
            merged.append(damage)
    return merged


def find_datasets(directory: Path | str) -> list[Path]:
    """Returns the dataset at `directory`, or those directly below it (train, test). Raises DataError if none."""
    directory = Path(directory)
    if not (directory / MANIFEST_NAME).exists() and directory.is_dir():
        below = sorted(child for child in directory.iterdir() if (child / MANIFEST_NAME).exists())
        if below:
            return below
    read_manifest(directory)
    return [directory]
