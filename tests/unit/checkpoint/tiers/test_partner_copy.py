"""A node's file on another node: real sockets between threads of one process."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from hpctrain.checkpoint.tiers import drain
from hpctrain.checkpoint.tiers.drain import NewFile, Pace, UnreadableError, copy_file
from hpctrain.checkpoint.tiers.node_store import LocalStore, forget_under, held_under
from hpctrain.checkpoint.tiers.partner_copy import (
    Offer,
    PartnerAddress,
    PartnerError,
    PartnerServer,
    connect,
    greet,
    send_file,
    send_partner_message,
)
from hpctrain.errors import CheckpointError
from tests.states import wait_for

pytestmark = pytest.mark.timing

TOKEN = secrets.token_bytes(32)


def store_of(tmp_path: Path, *, node: str = "right", keep_steps: int = 1) -> LocalStore:
    store = LocalStore(base=tmp_path / "local", node=node, keep_steps=keep_steps)
    store.prepare()
    return store


@contextmanager
def serving(store: LocalStore, *, timeout_s: float = 5) -> Iterator[PartnerAddress]:
    server = PartnerServer(node=store.node, token=TOKEN, shelf=store, timeout_s=timeout_s)
    try:
        # Loopback first: a sandbox may refuse connections to its own outer address.
        yield replace(server.address, addresses=("127.0.0.1",))
    finally:
        server.close()


def offer_of(path: Path, *, step: int = 5, save_id: str = "ab12") -> Offer:
    num_bytes = path.stat().st_size if path.exists() else 0
    return Offer(
        step=step, save_id=save_id, file=1, num_files=3, num_bytes=num_bytes, created_unix_s=1000.0 + step
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data-00001.h5"
    path.write_bytes(os.urandom((3 << 20) + 17))
    return path


def test_a_file_arrives_whole_and_counts_with_its_hash(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path)
    with serving(store) as partner:
        dead = replace(partner, addresses=("203.0.113.7", "127.0.0.1"))  # TEST-NET-3: nobody answers there
        assert greet(dead, token=TOKEN, within_s=2) == partner
        sent = send_file(source, offer=offer_of(source), partner=partner, token=TOKEN)
    (held,) = held_under(store.base)
    assert Path(held.path) == store.partner / "step-00000005" / "data-00001.h5"
    assert Path(held.path).read_bytes() == source.read_bytes()
    assert held.digest == sent.digest == xxhash.xxh3_64_hexdigest(source.read_bytes())
    assert held.offer == offer_of(source)
    assert sent.num_bytes == source.stat().st_size


def test_an_empty_file_and_a_later_one_of_the_same_step_replace_what_was_held(
    tmp_path: Path, source: Path
) -> None:
    store, empty = store_of(tmp_path), tmp_path / "empty"
    empty.touch()
    with serving(store) as partner:
        send_file(source, offer=offer_of(source), partner=partner, token=TOKEN)
        send_file(empty, offer=offer_of(empty, save_id="cd"), partner=partner, token=TOKEN)
    (held,) = held_under(store.base)
    assert (held.offer.save_id, held.offer.num_bytes) == ("cd", 0)


def test_only_the_newest_copies_are_kept(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path, keep_steps=2)
    with serving(store) as partner:
        for step in (10, 20, 30, 40):
            send_file(source, offer=offer_of(source, step=step), partner=partner, token=TOKEN)
    assert [held.offer.step for held in held_under(store.base)] == [40, 30]
    assert sorted(path.name for path in store.partner.iterdir()) == [
        "step-00000030", "step-00000030.json", "step-00000040", "step-00000040.json",
    ]  # fmt: skip
    forget_under(store.base, from_step=35)
    assert [held.offer.step for held in held_under(store.base)] == [30]


def test_who_does_not_know_the_token_or_is_somebody_else_stores_nothing(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path)
    with serving(store) as partner:
        with pytest.raises(PartnerError, match=r"node right cannot be reached over TCP .*127\.0\.0\.1"):
            connect(partner, token=b"another" * 5, timeout_s=2, within_s=0.5)
        # The right address, but of another node than the one that was meant.
        with pytest.raises(PartnerError, match="node left cannot be reached"):
            connect(replace(partner, node="left"), token=TOKEN, timeout_s=2, within_s=0.5)
        greet(partner, token=TOKEN)  # and strangers do not keep others out
    assert held_under(store.base) == []
    assert list(store.partner.iterdir()) == []


class Dripping:
    """Sends a byte at a time, slower than a handshake and faster than a silence would be noticed, to the end.

    again: connects anew, each time that it is sent away.
    """

    def __init__(self, port: int, *, every_s: float, again: bool = False) -> None:
        self.held_s = list[float]()
        self._connect = lambda: socket.create_connection(("127.0.0.1", port), timeout=10)
        self._every_s, self._again = every_s, again
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def _drip(self) -> None:
        while not self._leave.is_set():
            begin_s = time.monotonic()
            with suppress(OSError), self._connect() as connection:
                while not self._leave.wait(self._every_s):
                    connection.sendall(b"x")
            self.held_s.append(time.monotonic() - begin_s)
            if not self._again:
                return

    def __enter__(self) -> Dripping:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()


def test_strangers_that_drip_are_sent_away_in_time_and_the_partner_comes_in_meanwhile(
    tmp_path: Path, source: Path
) -> None:
    store = store_of(tmp_path)
    # 48 bytes at this pace take 24 s, with no silence as long as the timeout.
    with serving(store, timeout_s=1) as partner, ExitStack() as stack:
        strangers = [stack.enter_context(Dripping(partner.port, every_s=0.5)) for _ in range(8)]
        time.sleep(0.2)  # all are in, and fill the room that there is for connections without proof
        begin_s = time.monotonic()
        send_file(source, offer=offer_of(source), partner=partner, token=TOKEN)
        assert time.monotonic() - begin_s < 5
        assert [held.offer for held in held_under(store.base)] == [offer_of(source)]
        wait_for(lambda: all(stranger.held_s for stranger in strangers))
        # The timeout of 1 s, and two drips until a stranger notices; with room for a busy machine.
        assert max(stranger.held_s[0] for stranger in strangers) < 5


def test_strangers_that_come_back_at_once_do_not_keep_the_partner_out(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path)
    with serving(store, timeout_s=5) as partner, ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(Dripping(partner.port, every_s=0.1, again=True))
        for step in range(5):
            greet(partner, token=TOKEN, within_s=10)
            send_file(source, offer=offer_of(source, step=step), partner=partner, token=TOKEN)
    assert [held.offer.step for held in held_under(store.base)] == [4]


def test_a_partner_that_drips_is_given_up_when_the_time_for_connecting_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        leave = threading.Event()

        def answer() -> None:
            with suppress(OSError):
                while not leave.is_set():
                    connection, _ = stranger.accept()
                    with suppress(OSError), connection:
                        while not leave.wait(0.2):
                            connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        partner = PartnerAddress(node="right", addresses=("127.0.0.1",), port=stranger.getsockname()[1])
        begin_s = time.monotonic()
        with pytest.raises(PartnerError, match="node right cannot be reached"):
            connect(partner, token=TOKEN, timeout_s=5, within_s=1)
        assert time.monotonic() - begin_s < 4  # the 48 bytes of a handshake take 9.6 s at this pace
        leave.set()
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_stranger_that_accepts_gets_no_file(tmp_path: Path, source: Path) -> None:
    """Something else listens at the partner's address, as a bridge's address that every node has may lead to."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            while True:  # every attempt: the last one's reason is the one reported
                connection, _ = stranger.accept()
                with connection:
                    connection.sendall(bytes(16))
                    got.append(connection.recv(1 << 20))
                    if not got[-1]:
                        return
                    connection.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        partner = PartnerAddress(node="right", addresses=("127.0.0.1",), port=stranger.getsockname()[1])
        with pytest.raises(PartnerError, match="another server than this run's partner"):
            connect(partner, token=TOKEN, timeout_s=2, within_s=2)
        with socket.create_connection(stranger.getsockname()) as last:
            last.shutdown(socket.SHUT_WR)
            thread.join()
    assert len(got[0]) == 48  # a random number and a proof: nothing of ours


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"save_id": "../../x"}, "save_id"),
        ({"step": -1}, "step"),
        ({"file": 3}, "index 3 among 3 files"),
        ({"num_bytes": 1 << 59}, "bytes free"),
        ({"created_unix_s": float("nan")}, "created_unix_s"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused_and_the_reason_reaches_the_sender(
    tmp_path: Path, source: Path, change: dict[str, object], reason: str
) -> None:
    store = store_of(tmp_path)
    with serving(store) as partner, pytest.raises(PartnerError, match=f"right.*the node reports: .*{reason}"):
        send_file(source, offer=replace(offer_of(source), **change), partner=partner, token=TOKEN)  # type: ignore[arg-type]
    assert list(store.partner.glob("step-*")) == []


def test_bytes_that_arrive_damaged_are_not_kept(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path)
    monkeypatch.setattr(NewFile, "digest", lambda copy: "0" * 16)
    with serving(store) as partner, pytest.raises(PartnerError, match="arrived damaged"):
        send_file(source, offer=offer_of(source), partner=partner, token=TOKEN)
    assert held_under(store.base) == []


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes beyond it fail for real, with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_partner_whose_disk_fails_says_so_before_all_was_sent(tmp_path: Path) -> None:
    store, large, sent = store_of(tmp_path), tmp_path / "large", list[int]()
    large.touch()
    os.truncate(large, 1 << 30)
    with (
        serving(store) as partner,
        file_size_limit(3 << 20),
        pytest.raises(
            PartnerError, match=r"node right, after .* bytes: the node reports: cannot write .*limit"
        ),
    ):
        send_file(large, offer=offer_of(large), partner=partner, token=TOKEN, on_bytes=sent.append)
    assert sum(sent) < 1 << 29
    assert held_under(store.base) == []
    assert list(store.partner.glob("*/*")) == []


def test_a_partner_that_dies_while_it_is_sent_a_file_is_named_with_how_far_it_came(
    tmp_path: Path, source: Path
) -> None:
    store = store_of(tmp_path)
    server = PartnerServer(node="right", token=TOKEN, shelf=store, timeout_s=5)
    partner = replace(server.address, addresses=("127.0.0.1",))
    with pytest.raises(
        PartnerError, match=r"no copy of data-00001.h5 on node right, after \d+ of 3145745 bytes"
    ):
        send_file(
            source, offer=offer_of(source), partner=partner, token=TOKEN, on_bytes=lambda _: server.close()
        )
    assert held_under(store.base) == []
    store.prepare()
    assert list(store.partner.iterdir()) == []  # nothing is left of the half copy
    with pytest.raises(PartnerError, match="is the node up"):
        connect(partner, token=TOKEN, timeout_s=2, within_s=0.3)


def test_a_partner_that_says_nothing_is_given_up_after_the_timeout(tmp_path: Path, source: Path) -> None:
    """Its process is stopped: the connection stands, nobody answers."""

    class Stuck(LocalStore):
        def keep(self, offer: Offer, path: Path, digest: str) -> None:
            time.sleep(0.7)

    store = Stuck(base=tmp_path / "local", node="right", keep_steps=1)
    store.prepare()
    with serving(store) as partner, pytest.raises(PartnerError, match=r"no answer for 0\.3 s"):
        send_file(source, offer=offer_of(source), partner=partner, token=TOKEN, timeout_s=0.3)


def test_a_sender_that_dies_leaves_nothing(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path)
    with serving(store) as partner:
        connection = connect(partner, token=TOKEN, timeout_s=5, within_s=5)
        send_partner_message(connection, offer_of(source).to_json())
        connection.recv(1024)
        connection.sendall(bytes(1 << 20))
        connection.close()
        wait_for(lambda: not list(store.partner.glob("*/*")))
    assert held_under(store.base) == []


def test_what_has_no_note_or_another_length_does_not_count(tmp_path: Path, source: Path) -> None:
    store = store_of(tmp_path)
    with serving(store) as partner:
        send_file(source, offer=offer_of(source), partner=partner, token=TOKEN)
    note, path = store.partner / "step-00000005.json", store.partner / "step-00000005" / "data-00001.h5"
    os.truncate(path, 100)
    assert held_under(store.base) == []
    path.write_bytes(source.read_bytes())
    assert len(held_under(store.base)) == 1
    note.write_text(note.read_text().replace('"step": 5', '"step": 6'))
    assert held_under(store.base) == []
    note.write_text("[" * 4000)
    assert held_under(store.base) == []
    note.unlink()
    assert held_under(store.base) == []


def test_a_copy_with_another_hash_than_written_is_refused_and_removed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "SYNC_BYTES", 1 << 20)  # several byte_ranges also in this small file
    monkeypatch.setattr(drain, "COPY_CHUNK_BYTES", 300_000)
    target = tmp_path / "copy"
    digest = xxhash.xxh3_64_hexdigest(source.read_bytes())
    assert copy_file(source, target, expected=digest).digest == digest
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    with open(source, "r+b") as file:
        file.seek(1 << 20)
        file.write(b"rot")
    with pytest.raises(UnreadableError, match="damaged: its hash is"):
        copy_file(source, target, expected=digest)
    assert not target.exists()
    with pytest.raises(UnreadableError, match="cannot open"):
        copy_file(tmp_path / "missing", target)
    source.write_bytes(bytes(2 << 20))
    with file_size_limit(1 << 20), pytest.raises(CheckpointError, match="cannot write"):
        copy_file(source, target)
    assert not target.exists()


def test_a_pace_holds_the_average_below_its_limit() -> None:
    pace, begin_s = Pace(limit_mb_per_s=10), time.monotonic()
    for _ in range(3):
        pace.passed(1_000_000)
    assert time.monotonic() - begin_s >= 0.3
