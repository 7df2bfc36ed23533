"""File operations of one rank in a save: writing its content, and its part of the commit.

Nothing here waits for other ranks, except the engine `mpio`; so it can run in a separate thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.engine_choice import EngineChoice
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import part_name, remove
from hpctrain.checkpoint.files.write_buffers import Staging
from hpctrain.checkpoint.format.commit_header import SEAL_BYTES, PartSeal, encode_part_seal
from hpctrain.checkpoint.format.metadata import Metadata, StoredPart, encode_header
from hpctrain.checkpoint.planning.file_layout import FileLayout, NotAsPlannedError
from hpctrain.checkpoint.planning.hdf5_skeleton import structure_hash
from hpctrain.checkpoint.planning.metadata_template import metadata_text
from hpctrain.checkpoint.planning.rank_extents import Content
from hpctrain.checkpoint.retention.delete_old import retain
from hpctrain.checkpoint.saving.commit import flush_folder, rename_finished, seal_file
from hpctrain.checkpoint.saving.partial_checkpoint import file_in, leads_folder
from hpctrain.checkpoint.saving.save_options import SaveOptions, retention_of
from hpctrain.comm import Collective

# Returned instead of the hashes if this rank has not written all of its bytes.
NOT_AS_PLANNED = b""


@dataclass(frozen=True, kw_only=True, eq=False)
class FileWork:
    """The file operations of one save on one rank. Its methods raise CheckpointError.

    partial: path of the partial checkpoint. final: path after the commit. header: the metadata without tensors, parts
    and hashes.
    """

    final: Path
    partial: Path
    comm: Collective
    layout: FileLayout
    choice: EngineChoice
    options: SaveOptions
    header: Metadata

    @property
    def bypasses_cache(self) -> bool:
        return self.choice.engine is Engine.DIRECT and self.options.bypass_cache(self.choice.filesystem)

    def write_content(self, content: Content, *, staging: Staging) -> bytes:
        """Writes this rank's bytes and flushes them to disk.

        Returns this rank's entry in the argument of `commit`: a line of JSON about its file, then the hashes of its
        extents (uint64) in the plan's order; NOT_AS_PLANNED if the dtype or shape of a tensor is not as in the layout.
        """
        layout, options = self.layout, self.options
        hashes = np.zeros(len(layout.own.extent_bytes), dtype=np.uint64)
        structure = [] if layout.skeleton is None else self._structure()
        about: dict[str, Any] = {}
        if layout.skeleton is not None and self._file:
            about = {"bytes": layout.skeleton.file_bytes, "structure": structure_hash(structure)}
        limit = options.limit_mb_per_s
        try:
            self.choice.write(
                file_in(self.partial, self._file, options=options), layout.own.byte_ranges(content, hashes=hashes),
                structure=[(offset, memoryview(data)) for offset, data in structure], comm=self.comm,
                groups=self._groups, bypass_cache=self.bypasses_cache, staging=staging,
                limit_bytes_per_s=None if limit is None else limit * 1e6,
            )  # fmt: skip
        except NotAsPlannedError:
            return NOT_AS_PLANNED
        if options.local and self._leads_folder:
            flush_folder(self.partial)
        return json.dumps(about).encode() + b"\n" + hashes.tobytes()

    def commit(self, content_results: Sequence[bytes]) -> dict[str, Any]:
        """Does this rank's part of the commit: on rank 0 metadata and commit header, on leaders the rename.

        content_results: the results of `write_content` of all ranks. Returns "bytes", the size of the checkpoint (0
        except on rank 0), and "notes", a list of messages.
        """
        notes: list[str] = []
        total_bytes = 0
        if self.comm.rank == 0:
            parts, hashes = self._gathered(content_results)
            skeleton, text = self.layout.skeleton, self.layout.text
            assert skeleton is not None
            assert text is not None
            header = encode_header(replace(self.header, parts=parts), byte_order=sys.byteorder)
            metadata = metadata_text(header, text, hashes=hashes, padded_bytes=skeleton.metadata_bytes)
            seal_file(file_in(self.partial, 0, options=self.options), skeleton=skeleton, metadata=metadata)
            total_bytes = skeleton.file_bytes + sum(part.num_bytes for part in parts)
            if self.options.files != 1:
                flush_folder(self.partial)
        if self._leads_folder:
            rename_finished(self.partial, self.final, unique=self.header.id)
            if not self.options.local:
                notes = self._retain()
        return {"bytes": total_bytes, "notes": notes}

    def after_commit(self) -> list[str]:
        """In local mode, deletes checkpoints that are no longer kept. Call it after all ranks have committed. Returns
        messages for the user."""
        return self._retain() if self.options.local and self._leads_folder else []

    def undo(self, *, committing: bool) -> None:
        """Removes the files of a save that failed on any rank.

        committing: `commit` was started, so in local mode this rank may have renamed the checkpoint. If it was not, the
        final name may belong to an older checkpoint of the same step, which is kept.
        """
        if self._leads_folder:
            for path in (self.partial, *([self.final] if self.options.local and committing else [])):
                with suppress(OSError):
                    remove(path)

    def _retain(self) -> list[str]:
        return retain(
            self.final.parent, saved=self.final, retention=retention_of(self.options.keep),
            recycle=self.options.recycles(self.choice.filesystem),
        )  # fmt: skip

    def _gathered(
        self, content_results: Sequence[bytes]
    ) -> tuple[tuple[StoredPart, ...], NDArray[np.uint64]]:
        """Returns the part files, and the hashes of all ranks' extents: uint64, shape (num_extents,)."""
        files = self.layout.files
        entries = [data.partition(b"\n") for data in content_results]
        parts = []
        for number in range(1, files.count):
            about = json.loads(entries[files.leaders[number]][0])
            parts.append(
                StoredPart(
                    name=part_name(number), num_bytes=about["bytes"], structure_hash=about["structure"]
                )
            )
        hashes = np.frombuffer(b"".join(data for _, _, data in entries), dtype=np.uint64)
        return tuple(parts), hashes

    def _structure(self) -> list[tuple[int, bytes]]:
        """Returns the byte ranges (offset, data) of HDF5's structures in the file that this rank leads."""
        skeleton = self.layout.skeleton
        assert skeleton is not None
        byte_ranges = list(skeleton.byte_ranges)
        if self._file:  # the header of a part file lies in the first byte range
            seal = PartSeal(
                id=self.header.id, step=self.header.step, number=self._file, num_files=self.layout.files.count
            )
            offset, data = byte_ranges[0]
            byte_ranges[0] = (offset, encode_part_seal(seal) + data[SEAL_BYTES:])
        return byte_ranges

    @property
    def _file(self) -> int:
        return self.layout.files.of_rank[self.comm.rank]

    @property
    def _groups(self) -> list[list[int]]:
        """For each file, the world ranks that write to it."""
        files = self.layout.files
        groups: list[list[int]] = [[] for _ in range(files.count)]
        for member, file in zip(self.comm.members, files.of_rank, strict=True):
            groups[file].append(member)
        return groups

    @property
    def _leads_folder(self) -> bool:
        return leads_folder(self.layout, comm=self.comm, options=self.options)
