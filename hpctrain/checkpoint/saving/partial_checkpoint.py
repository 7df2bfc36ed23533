"""Creates the partial checkpoint of a save: its name, its stripe layout and its disk space, without content."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.engines.engine_choice import EngineChoice
from hpctrain.checkpoint.files.checkpoint_names import part_name, partial_name, remove
from hpctrain.checkpoint.files.lustre_striping import set_stripes, stripes_for
from hpctrain.checkpoint.planning.file_layout import FileLayout
from hpctrain.checkpoint.saving.commit import create_file, make_room
from hpctrain.checkpoint.saving.save_options import SaveOptions
from hpctrain.comm import Collective, agreed, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError


def begin_partial(
    directory: Path,
    name: str,
    *,
    layout: FileLayout,
    choice: EngineChoice,
    comm: Collective,
    options: SaveOptions,
) -> tuple[Path, str, str]:
    """Creates the files of the partial checkpoint, without content. Collective. Returns its path, its id, and a note.

    Raises CheckpointError on every rank if any rank fails; the partial checkpoint is then removed.
    """
    leads = leads_folder(layout, comm=comm, options=options)
    unique = on_rank_0(comm, lambda: secrets.token_hex(8))
    partial = directory / partial_name(name, unique=unique)

    def make() -> list[str]:
        if not leads:
            return []
        skeleton = layout.skeleton if options.recycles(choice.filesystem) else None
        return make_room(
            directory, partial, folder=options.files != 1,
            spare_bytes=None if skeleton is None else skeleton.file_bytes,
        )  # fmt: skip

    def create() -> str:
        if layout.skeleton is None:
            return ""
        path = file_in(partial, layout.files.of_rank[comm.rank], options=options)
        file_bytes = layout.skeleton.file_bytes
        note = set_stripes(path, stripes=stripes_for(file_bytes), filesystem=choice.filesystem)
        create_file(path, file_bytes=file_bytes)
        return note or ""

    try:
        notes = agreed(comm, make, os_error=CheckpointError)
        notes += [agreed(comm, create, os_error=CheckpointError)]
        return partial, unique, "; ".join(filter(None, notes))
    except HpctrainError:
        if leads:
            with suppress(OSError):
                remove(partial)
        raise


def leads_folder(layout: FileLayout, *, comm: Collective, options: SaveOptions) -> bool:
    """True if this rank creates and renames the checkpoint: rank 0, or in local mode the leader of each file. Not
    collective."""
    return layout.skeleton is not None if options.local else comm.rank == 0


def file_in(partial: Path, number: int, *, options: SaveOptions) -> Path:
    """Returns the path of file `number` of the partial checkpoint, without accessing the filesystem."""
    return partial if options.files == 1 else partial / part_name(number)
