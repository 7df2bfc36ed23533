"""Folders that all ranks use."""

from __future__ import annotations

import errno
import platform
import threading
import time
from pathlib import Path

import pytest

from hpctrain.comm import World, make_shared_folder
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.collectives import agreement as shared_folder
from hpctrain.errors import LaunchError


def test_only_rank_0_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = Path.mkdir

    def noted(path: Path, *args: object, **options: object) -> None:
        made.append(threading.current_thread().name)
        make(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", noted)
    names = run_threads(3, lambda world: _made_and_seen(tmp_path / "a" / "b", world), timeout_s=300)
    assert set(made) == {names[0]}


def _made_and_seen(folder: Path, world: World) -> str:
    make_shared_folder(folder, comm=world)
    make_shared_folder(folder, comm=world)  # one that is there is none the worse for it
    assert folder.is_dir()
    return threading.current_thread().name


def test_what_is_not_seen_at_once_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "not yet" / "here"
    later = threading.Timer(0.3, lambda: folder.mkdir(parents=True))
    begin_s = time.monotonic()
    later.start()
    assert shared_folder.is_seen(folder)
    assert time.monotonic() - begin_s >= 0.3
    later.join()


def test_a_stale_handle_is_looked_up_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [OSError(errno.ESTALE, "Stale file handle"), None]
    exists = Path.exists

    def stale_once(path: Path) -> bool:
        error = errors.pop() if path == tmp_path and errors else None
        if error is not None:
            raise error
        return exists(path)

    monkeypatch.setattr(Path, "exists", stale_once)
    assert shared_folder.is_seen(tmp_path)
    assert shared_folder.is_seen(tmp_path)
    assert errors == []


def test_one_that_other_ranks_do_not_see_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_WITHIN_S", 0.2)
    errors: dict[int, str] = {}

    def rank_main(world: World) -> None:
        with pytest.raises(LaunchError) as caught:
            make_shared_folder(tmp_path / str(world.rank), comm=world)
        errors[world.rank] = str(caught.value)

    run_threads(3, rank_main, timeout_s=300)
    assert len(set(errors.values())) == 1
    assert (
        f"rank 1 ({platform.node()}): the folder {tmp_path / '1'} that rank 0 made is not visible"
        in errors[0]
    )
    assert "all nodes share" in errors[0]


def test_one_that_cannot_be_made_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank_main(world: World) -> None:
        with pytest.raises(LaunchError, match="Not a directory"):
            make_shared_folder(tmp_path / "file" / "folder", comm=world)

    run_threads(2, rank_main, timeout_s=300)
