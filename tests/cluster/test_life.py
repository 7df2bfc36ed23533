"""A cluster comes up, and leaves nothing when it goes, however it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError, ClusterPlan
from tests.cluster.record import Record, end, namespace_of, processes_in
from tests.ranks_launcher import REPOSITORY
from tests.states import wait_for

pytestmark = pytest.mark.launches

_OWNER = """
import sys, time
from pathlib import Path
from tests.cluster import Cluster, ClusterPlan, Lifetime
plan = ClusterPlan(directory=Path(sys.argv[1]), num_nodes=2, rate=None)
cluster = Cluster.up(plan, lifetime=Lifetime(sys.argv[2]))
print("up", flush=True)
time.sleep(600)
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def everything_of(directory: Path) -> set[int]:
    """Process namespaces that the cluster's places are in."""
    record = Record.read(directory)
    assert record is not None
    assert record.places
    return {namespace_of(process.pid, "pid") for process in record.places.values()}


@pytest.fixture
def directory(cluster_folder: Path) -> Iterator[Path]:
    where = cluster_folder / f"test-{os.getpid()}-life"
    yield where
    end(where)


@contextlib.contextmanager
def owner(directory: Path, lifetime: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that brings a cluster up."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(directory), lifetime],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_up_status_run_and_down_by_hand(cluster_folder: Path) -> None:
    name = f"test-{os.getpid()}-hand"
    before = links()
    try:
        up = command("up", "--name", name, "--nodes", "2", "--rate", "200mbit")
        assert up.returncode == 0, up.stderr
        assert len(everything_of(cluster_folder / name)) == 3
        first = Record.read(cluster_folder / name)
        assert first is not None
        # A second one of the same name takes the first one's place, and all of it.
        again = command("up", "--name", name, "--nodes", "1", "--rate", "none")
        assert again.returncode == 0, again.stderr
        # Not by namespace: the kernel may give the new ones the numbers of those that are gone.
        assert not any(process.alive for process in first.places.values())
        namespaces = everything_of(cluster_folder / name)
        reported = command("status", "--name", name)
        assert reported.returncode == 0
        assert "hpct0" in reported.stdout
        assert "idle" in reported.stdout
        assert "hpct1" not in reported.stdout
        ran = command("run", "--name", name, "--", "srun", "sh", "-c", "hostname; exit 7")
        assert ran.stdout == "hpct0\n"
        assert ran.returncode == 7
    finally:
        down = command("down", "--name", name)
    assert down.returncode == 0
    assert not processes_in(namespaces, "pid")
    assert not (cluster_folder / name).exists()
    assert links() == before
    assert command("status", "--name", name).returncode == 1
    assert "no cluster" in command("down", "--name", name).stdout
    assert "no cluster is up" in command("run", "--name", name, "--", "true").stderr


@pytest.mark.thorough  # test_gluster.py, with volumes
def test_a_cluster_of_a_killed_owner_ends_by_itself(directory: Path) -> None:
    before = links()
    with owner(directory, "owner") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        namespaces = everything_of(directory)
        process.send_signal(signal.SIGKILL)
        wait_for(
            lambda: not processes_in(namespaces, "pid"),
            says=lambda: processes_in(namespaces, "pid"),
            timeout_s=60,
        )
    assert links() == before
    record = Record.read(directory)
    assert record is not None
    assert record.stale
    end(directory)
    assert not directory.exists()


@pytest.mark.thorough
def test_a_kept_cluster_outlives_its_killed_owner_and_is_taken_down_by_another(directory: Path) -> None:
    with owner(directory, "kept") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        namespaces = everything_of(directory)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = Cluster.attach(directory)
        hosts = found.run(["srun", "--nodes=2", "hostname"], timeout_s=300).stdout.split()
        assert sorted(hosts) == ["hpct0", "hpct1"]
        found.down()
    assert not processes_in(namespaces, "pid")
    assert not directory.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3])
def test_killed_while_it_comes_up_it_leaves_nothing(directory: Path, delay_s: float) -> None:
    before = processes_of_this_folder(directory)
    with owner(directory, "kept") as process:
        wait_for(directory.exists, every_s=0.005)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)  # a place that was just being started sees that its owner is gone
        end(directory)
    wait_for(lambda: not processes_of_this_folder(directory) - before)
    assert not directory.exists()


def processes_of_this_folder(directory: Path) -> set[int]:
    """Processes that name the folder: places, and daemons with its configuration."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (
                    Path(f"/proc/{name}/cmdline").read_bytes() + Path(f"/proc/{name}/environ").read_bytes()
                )
                if str(directory).encode() + b"/" in words:
                    found.add(int(name))
    return found


def test_the_machine_sees_none_of_it(cluster: Cluster) -> None:
    assert "hpct" not in links()
    assert "hpct" not in Path("/etc/hosts").read_text()
    assert os.uname().nodename not in cluster.node_names
    assert not Path("/dev/shm").joinpath("hpct-test").exists()
    cluster.run(["touch", "/dev/shm/hpct-test"], timeout_s=300, place="hpct0")
    asked = cluster.run(["ls", "/dev/shm"], timeout_s=300, place="hpct1")
    assert "hpct-test" not in asked.stdout  # nor do nodes share memory with each other
    assert not Path("/dev/shm/hpct-test").exists()


# Tells what others have left in the temporary folder, and leaves a file of its own.
_LEAVES = (
    "import os, tempfile; names = os.listdir(tempfile.gettempdir())\n"
    "left = (name for name in names if name.startswith(('hpct-head', 'hpct-hpct')))\n"
    "print(os.uname().nodename, tempfile.gettempdir(), *left, flush=True)\n"
    "open(f'{tempfile.gettempdir()}/hpct-{os.uname().nodename}', 'x').close()"
)


def test_every_place_has_a_temporary_folder_of_its_own_in_which_shared_ones_stand(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").write_text("by all")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the machine's: not meant for the places
    own = {"hpct-head": cluster.run([sys.executable, "-c", _LEAVES], timeout_s=300)}
    own["nodes"] = cluster.run(["srun", "--nodes=4", sys.executable, "-c", _LEAVES], timeout_s=300)
    reported = sorted("".join(done.stdout for done in own.values()).splitlines())
    assert reported == [f"{place} /tmp" for place in sorted(cluster.plan.addresses)], own
    ask = ["sh", "-c", f"cat {tmp_path}/shared; cd /tmp; echo hpct-h*; stat -c %a ."]
    for place in cluster.plan.addresses:
        asked = cluster.run(ask, timeout_s=300, place=place)
        assert asked.stdout == f"by allhpct-{place}\n1777\n", asked.stderr
        assert not Path("/tmp", f"hpct-{place}").exists()


def test_a_limited_link_caps_the_rate_and_the_bytes_of_each_node_are_counted(cluster: Cluster) -> None:
    script = (
        "import socket, sys\n"
        "if sys.argv[1] == 'send':\n"
        "    s = socket.create_connection(('hpct1', 5555)); s.sendall(bytes(5_000_000)); s.shutdown(1); s.recv(1)\n"
        "else:\n"
        "    l = socket.create_server(('', 5555)); print('listening', flush=True); s, _ = l.accept()\n"
        "    n = 0\n"
        "    while got := len(s.recv(1 << 20)): n += got\n"
        "    s.sendall(b'x'); print(n)\n"
    )
    cluster.set_rate("100mbit")
    try:
        listener = subprocess.Popen(
            cluster.argv([sys.executable, "-c", script, "receive"], cwd=Path("/"), place="hpct1"),
            env=cluster.environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        before, start_s = cluster.bytes_sent(), time.monotonic()
        cluster.run([sys.executable, "-c", script, "send"], timeout_s=300, place="hpct0")
        wall_s, after = time.monotonic() - start_s, cluster.bytes_sent()
        assert listener.communicate(timeout=300)[0] == "5000000\n"
    finally:
        cluster.set_rate("1gbit")
    sent = {node: after[node] - before[node] for node in cluster.node_names}
    assert 5_000_000 < sent["hpct0"] < 5_500_000
    assert sent["hpct2"] < 100_000
    # 512 kB may pass at once; the rest cannot be faster than the link.
    assert wall_s > (5_000_000 - 2 * 512 * 1024) * 8 / 100e6


def test_a_cut_link_is_cut_and_comes_back(cluster: Cluster) -> None:
    ask = [
        sys.executable,
        "-c",
        "import socket; socket.create_connection(('hpct3', 6818), timeout=1).close()",
    ]
    assert cluster.run(ask, timeout_s=300, place="hpct0").returncode == 0
    cluster.cut_link("hpct3")
    try:
        assert cluster.run(ask, timeout_s=300, place="hpct0").returncode != 0
        assert cluster.run(ask, timeout_s=300, place="hpct3").returncode == 0
    finally:
        cluster.mend_link("hpct3")
    wait_for(lambda: cluster.run(ask, timeout_s=300, place="hpct0").returncode == 0, every_s=0.2)


def test_a_cluster_that_cannot_come_up_says_why_and_leaves_nothing(directory: Path) -> None:
    before = links()
    with pytest.raises(ClusterError, match=r"tc qdisc replace .* 99999999999999999999gbit"):
        Cluster.up(ClusterPlan(directory=directory, num_nodes=1, rate="99999999999999999999gbit"))
    assert not directory.exists()
    assert not processes_of_this_folder(directory)
    assert links() == before
