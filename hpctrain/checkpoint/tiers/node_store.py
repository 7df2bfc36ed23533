"""What one node keeps of a run on storage of its own: its files, and copies of another node's. Thin I/O.

    LOCAL/<run>/<node>/own/step-00000050/data-00001.h5        written by the node's ranks
    LOCAL/<run>/<node>/own/step-00000050.json                 says what it is: without this it does not count
    LOCAL/<run>/<node>/partner/step-00000050/data-00000.h5    sent by the leader of another node
    LOCAL/<run>/<node>/partner/step-00000050.json

Not collective: the node's leader does all of this.
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
from hpctrain.checkpoint.files.full_io import explained, sync_directory
from hpctrain.checkpoint.format.content_hash import HASH_DIGITS
from hpctrain.checkpoint.format.link_names import escape
from hpctrain.checkpoint.tiers.partner_copy import Offer
from hpctrain.checkpoint.tiers.partner_protocol import PartnerError
from hpctrain.errors import CheckpointError

OWN, PARTNER = "own", "partner"
_NOTE = re.compile(r"step-(\d{8,18})\.json")
_STEP = re.compile(r"step-(\d{8,18})")
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A file of a checkpoint that a node holds, as its note says. path: of the file. digest: xxh3_64 of all of
    it; "" when it was never read as a whole. kind: OWN or PARTNER."""

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
    """Name of the run's folder on every node: the same again for the same shared checkpoint directory."""
    resolved = os.path.realpath(shared)
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(Path(resolved).parts[-2:])).strip("-")[:60]
    return f"{label}-{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStore:
    """One node's part of LOCAL/<run>. keep_steps: how many steps stay of each kind, at least 1."""

    base: Path  # LOCAL/<run>
    node: str
    keep_steps: int

    @property
    def root(self) -> Path:
        return self.base / escape(self.node)

    @property
    def own(self) -> Path:
        """Directory that the node's ranks save to."""
        return self.root / OWN

    @property
    def partner(self) -> Path:
        return self.root / PARTNER

    def prepare(self) -> None:
        """Make the folders; remove what killed copies left. Raises CheckpointError."""
        for directory in (self.own, self.partner):
            with explained(action="keep checkpoints in", path=directory):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                for path in directory.iterdir():
                    if path.name.startswith(".taking-"):
                        _remove(path)

    # ------------------------------------------------------------------ the node's own file

    def note_own(self, path: Path, *, offer: Offer, digest: str = "") -> None:
        """From now on the finished file `path` counts. Raises CheckpointError."""
        _write_note(self.own, Held(path=str(path), kind=OWN, offer=offer, digest=digest))

    # ------------------------------------------------------------------ another node's file: a `Shelf`

    def place(self, offer: Offer) -> Path:
        """See `Shelf`."""
        for path in self.partner.glob(".taking-*"):
            with suppress(OSError):  # of a copy that failed; one that is not empty is going on
                path.rmdir()
        taking = self.partner / f".taking-{secrets.token_hex(8)}"
        with explained(action="keep a partner's copy in", path=taking):
            taking.mkdir(parents=True)
        return taking / part_name(offer.file)

    def keep(self, offer: Offer, path: Path, digest: str) -> None:
        """See `Shelf`. The file at `path`, which `place` named, is whole: it replaces what was held of that step."""
        final = self.partner / folder_name(offer.step)
        with explained(action="keep a partner's copy as", path=final):
            sync_directory(path.parent)
            _forget_step(self.partner, offer.step)
            os.rename(path.parent, final)
            sync_directory(self.partner)
        _write_note(self.partner, Held(path=str(final / path.name), kind=PARTNER, offer=offer, digest=digest))
        self.prune(PARTNER)

    # ------------------------------------------------------------------ what is held, and no longer

    def prune(self, kind: str) -> None:
        """Of the noted files keep the newest `keep_steps`; remove the older ones, and older ones without a note.
        Raises CheckpointError."""
        directory = self.root / kind
        with explained(action="remove older copies from", path=directory):
            noted = sorted(step for step in _steps_in(directory) if _note_path(directory, step).exists())
            if len(noted) < self.keep_steps:
                return
            for step in _steps_in(directory):
                if step < noted[-self.keep_steps]:
                    _forget_step(directory, step)


def forget_under(base: Path, *, from_step: int) -> None:
    """Remove all that this node keeps under LOCAL/<run> of step `from_step` and later, under whatever node's name:
    of a history that the run has left, or is about to write again. Raises CheckpointError."""
    with explained(action="remove older copies from", path=base):
        for directory in (*base.glob(f"*/{OWN}"), *base.glob(f"*/{PARTNER}")):
            for step in _steps_in(directory):
                if step >= from_step:
                    _forget_step(directory, step)


def held_under(base: Path) -> list[Held]:
    """All that this node can read under LOCAL/<run>, of whatever node's name, own files first.

    What has no note, or not the length that the note says, does not count. Raises CheckpointError.
    """
    found = []
    with explained(action="look for checkpoints in", path=base):
        if not base.is_dir():
            return []
        for kind in (OWN, PARTNER):
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
    """The note goes first, and for good: a file that is half removed never counts. On emulated nodes others may
    remove the same at the same time."""
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
    """None for anything that is not as `_write_note` writes it, or speaks of a file that is not there."""
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
    """The one file that this node has of the checkpoint just saved to `folder`. Raises CheckpointError."""
    with explained(action="find", path=folder):
        files = [path for path in folder.iterdir() if path.suffix == ".h5"]
    if len(files) != 1:
        raise CheckpointError(f"{folder} should hold one file of this node and holds {len(files)}")
    return files[0]
