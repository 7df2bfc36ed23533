"""Checkpoint files of a run on node storage: the node's own files, and copies of another node's files.

    LOCAL/<run>/<node>/own/step-00000050/data-00001.h5        written by the node's ranks
    LOCAL/<run>/<node>/own/step-00000050.json                 the note that describes it; a file without one is
        ignored
    LOCAL/<run>/<node>/partner/step-00000050/data-00000.h5    sent by the leader of another node
    LOCAL/<run>/<node>/partner/step-00000050.json
    LOCAL/<run>/<node>/kept/step-00000057/data-00000.h5       a whole checkpoint that one rank of the node wrote after
        the loss of another rank, see `keep_state`
    LOCAL/<run>/<node>/kept/step-00000057.json

LOCAL is the argument `local` of `Tiers.open`. Not collective: called by the leader of the node, its lowest rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import folder_name, part_name
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.dtypes import escape
from hpctrain.checkpoint.tiers.partner_copy import Offer, PartnerError
from hpctrain.errors import CheckpointError
from hpctrain.storage import HASH_DIGITS, replace_file, sync_directory

OWN, PARTNER, KEPT = "own", "partner", "kept"
_KINDS = (OWN, PARTNER, KEPT)
_DIRECTORY = "shared-directory"  # in LOCAL/<run>: the path of the run's shared checkpoint directory
_NOTE = re.compile(r"step-(\d{8,18})\.json")
_STEP = re.compile(r"step-(\d{8,18})")
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A checkpoint file on a node's storage, as described by the small metadata file (note) beside it.

    Attributes:
        path: The file.
        kind: OWN if the node's ranks wrote it, PARTNER if another node sent it, KEPT if one rank wrote it alone.
        offer: Step and id of the checkpoint that the file belongs to, and the file's index and length.
        digest: Hash (xxh3_64) of all bytes of the file; "" if the file was never read as a whole.
    """

    path: str
    kind: str
    offer: Offer
    digest: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "offer": self.offer.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Held:
        return cls(
            path=str(value["path"]),
            kind=str(value["kind"]),
            offer=Offer.from_json(value["offer"]),
            digest=str(value["digest"]),
        )


def run_key(shared: Path) -> str:
    """Returns the name of a run's folder on the storage of every node.

    The name depends only on the path `shared` of the checkpoint directory that all nodes share.
    """
    resolved = os.path.realpath(shared)
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(Path(resolved).parts[-2:])).strip("-")[:60]
    return f"{label}-{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStore:
    """One node's folder of a run on node storage, with checkpoint files.

    A file is of kind OWN if the node's ranks wrote it, of kind PARTNER if another node sent it, of kind KEPT if one
    rank wrote it alone. Of each kind, the store keeps the files of the newest `keep_steps` steps; at least 1.
    """

    base: Path  # LOCAL/<run>
    node: str
    keep_steps: int

    @property
    def root(self) -> Path:
        return self.base / escape(self.node)

    @property
    def own(self) -> Path:
        """Directory on node storage to which the node's ranks save."""
        return self.root / OWN

    @property
    def partner(self) -> Path:
        return self.root / PARTNER

    @property
    def kept(self) -> Path:
        """Directory of the whole checkpoints that single ranks of the node have written."""
        return self.root / KEPT

    def prepare(self) -> None:
        """Creates the folders of this node, and removes files that killed runs have left incomplete.

        Raises CheckpointError.
        """
        for directory in (self.own, self.partner, self.kept):
            with explained(action="keep checkpoints in", path=directory):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                for path in directory.iterdir():
                    if path.name.startswith(".taking-"):
                        _remove(path)

    # ------------------------------------------------------------------ the node's own file

    def note_own(self, path: Path, *, offer: Offer, digest: str = "") -> None:
        """Writes a small metadata file (note) for the finished checkpoint file `path`, which makes the file valid.

        `offer` describes the file, and `digest` is its hash, "" if unknown. Raises CheckpointError.
        """
        _write_note(self.own, Held(path=str(path), kind=OWN, offer=offer, digest=digest))

    # ------------------------------------------------------------------ a whole checkpoint of one rank

    def keep_whole(self, folder: Path, *, offer: Offer) -> None:
        """Moves `folder`, a whole checkpoint of one file, to its place, and removes older ones. Raises CheckpointError.

        A checkpoint of the same step that is already there is replaced.
        """
        final = self.kept / folder_name(offer.step)
        with explained(action="keep the state as", path=final):
            _forget_step(self.kept, offer.step)
            os.rename(folder, final)
        _write_note(self.kept, Held(path=str(final / part_name(0)), kind=KEPT, offer=offer, digest=""))
        self.prune(KEPT)

    def remove(self) -> None:
        """Removes all files of this node, and the run's folder if no other node has files there. Ignores errors."""
        shutil.rmtree(self.root, ignore_errors=True)
        with suppress(OSError):
            if [path.name for path in self.base.iterdir()] == [_DIRECTORY]:
                shutil.rmtree(self.base, ignore_errors=True)

    def kept_steps(self) -> list[int]:
        """Returns the steps of the whole checkpoints that are kept."""
        return [step for step in _steps_in(self.kept) if _read_note(self.kept, step) is not None]

    # ------------------------------------------------------------------ another node's file: a `Shelf`

    def place(self, offer: Offer) -> Path:
        """Returns the path, in a new folder, to which a file that another node offers is to be written."""
        for path in self.partner.glob(".taking-*"):
            with suppress(OSError):  # left by a failed copy; a folder that is not empty is in use
                path.rmdir()
        taking = self.partner / f".taking-{secrets.token_hex(8)}"
        with explained(action="keep a partner's copy in", path=taking):
            taking.mkdir(parents=True)
        return taking / part_name(offer.file)

    def keep(self, offer: Offer, path: Path, digest: str) -> None:
        """Makes the complete file at `path`, which `place` returned, the valid copy of its step.

        `offer` describes the file, and `digest` is its hash. An existing copy of the same step is replaced. Raises
        CheckpointError.
        """
        final = self.partner / folder_name(offer.step)
        with explained(action="keep a partner's copy as", path=final):
            sync_directory(path.parent)
            _forget_step(self.partner, offer.step)
            os.rename(path.parent, final)
            sync_directory(self.partner)
        _write_note(self.partner, Held(path=str(final / path.name), kind=PARTNER, offer=offer, digest=digest))
        self.prune(PARTNER)

    # ------------------------------------------------------------------ retention

    def prune(self, kind: str) -> None:
        """Removes checkpoint files of kind `kind`, OWN or PARTNER, except the newest `keep_steps` complete files.

        A file is complete if a small metadata file (note) describes it. Incomplete files are removed if they are older
        than the files that are kept. Raises CheckpointError.
        """
        directory = self.root / kind
        with explained(action="remove older copies from", path=directory):
            noted = sorted(step for step in _steps_in(directory) if _note_path(directory, step).exists())
            if len(noted) < self.keep_steps:
                return
            for step in _steps_in(directory):
                if step < noted[-self.keep_steps]:
                    _forget_step(directory, step)


def forget_under(base: Path, *, from_step: int) -> None:
    """Removes the checkpoint files of step `from_step` and later in `base`, a run's folder on node storage.

    The files of all nodes in that folder are removed. The run will write these steps again. Raises CheckpointError.
    """
    with explained(action="remove older copies from", path=base):
        for directory in (found for kind in _KINDS for found in base.glob(f"*/{kind}")):
            for step in _steps_in(directory):
                if step >= from_step:
                    _forget_step(directory, step)


def note_directory(base: Path, *, shared: Path) -> None:
    """Records in `base`, a run's folder on node storage, that the run saves to the shared directory `shared`.

    Raises CheckpointError.
    """
    path = base / _DIRECTORY
    content = f"{os.path.realpath(shared)}\n".encode()
    with explained(action="write", path=path):
        if path.exists() and path.read_bytes() == content:
            return
        replace_file(path, content, partial=base / f".taking-{secrets.token_hex(8)}")


def others_of(base: Path, *, shared: Path) -> dict[str, int]:
    """Returns other runs with the shared checkpoint directory `shared` that have left checkpoints on this node.

    `base` is this run's folder on node storage. The result maps the name of each such run's folder, a sibling of
    `base`, to the newest step in it. Raises CheckpointError.
    """
    found = {}
    directory = os.path.realpath(shared)
    with explained(action="look for checkpoints in", path=base.parent):
        for other in base.parent.iterdir():
            if other == base or not other.is_dir():
                continue
            note = other / _DIRECTORY
            noted = note.read_text(encoding="utf-8").strip() if note.is_file() else None
            if noted == directory or (noted is None and other.name == run_key(shared)):
                steps = [held.offer.step for held in held_under(other)]
                if steps:
                    found[other.name] = max(steps)
    return found


def held_under(base: Path) -> list[Held]:
    """Returns all valid checkpoint files in `base`, a run's folder on node storage, of any node.

    Files that a node's ranks wrote come before copies that other nodes sent. A file is left out if no small metadata
    file (note) describes it, or if its length differs from the one in the note. Raises CheckpointError.
    """
    found = []
    with explained(action="look for checkpoints in", path=base):
        if not base.is_dir():
            return []
        for kind in _KINDS:
            for directory in sorted(base.glob(f"*/{kind}")):
                for step in sorted(_steps_in(directory), reverse=True):
                    held = _read_note(directory, step)
                    if held is not None:
                        found.append(held)
    return found


def _note_path(directory: Path, step: int) -> Path:
    return directory / f"{folder_name(step)}.json"


def _steps_in(directory: Path) -> set[int]:
    steps = set()
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():
            match = _NOTE.fullmatch(path.name) or _STEP.fullmatch(path.name)
            if match:
                steps.add(int(match[1]))
    return steps


def _forget_step(directory: Path, step: int) -> None:
    """Removes the checkpoint file of a step and, before it, the small metadata file (note) that makes it valid.

    So a partly removed file is never valid. On emulated nodes other ranks may remove the same files at the same time.
    """
    with suppress(FileNotFoundError):
        _note_path(directory, step).unlink()
        sync_directory(directory)
    _remove(directory / folder_name(step))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        while path.exists():
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_note(directory: Path, held: Held) -> None:
    final = _note_path(directory, held.offer.step)
    partial = directory / f".taking-{secrets.token_hex(8)}"
    with explained(action="write", path=final):
        try:
            with open(partial, "xb") as file:
                file.write(
                    json.dumps({"offer": held.offer.to_json(), "digest": held.digest}).encode() + b"\n"
                )
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, final)
            sync_directory(directory)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _read_note(directory: Path, step: int) -> Held | None:
    """Returns the checkpoint file of step `step` in `directory`, as its small metadata file (note) describes it.

    Returns None if the note is invalid, or if the file is missing or of another length.
    """
    try:
        with open(_note_path(directory, step), "rb") as file:
            value = json.loads(file.read(_MAX_NOTE_BYTES))
        offer, digest = Offer.from_json(value["offer"]), str(value["digest"])
        path = directory / folder_name(step) / part_name(offer.file)
        if offer.step != step or len(digest) not in (0, HASH_DIGITS):
            return None
        if path.is_symlink() or not path.is_file() or path.stat().st_size != offer.num_bytes:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PartnerError, RecursionError):
        return None
    return Held(path=str(path), kind=directory.name, offer=offer, digest=digest)


def own_file(folder: Path) -> Path:
    """Returns this node's file of the checkpoint just saved to `folder`.

    Raises CheckpointError if there is not exactly one.
    """
    with explained(action="find", path=folder):
        files = [path for path in folder.iterdir() if path.suffix == ".h5"]
    if len(files) != 1:
        raise CheckpointError(
            f"{folder} must hold exactly one .h5 file, that of this node, but holds {len(files)}"
        )
    return files[0]
