"""Ranks that are forked from a server are what they would be if each had started by itself."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpctrain.launch.fork_server.plan import KEY_VARIABLE, ForkServer, find_client, plan_fork_server
from hpctrain.supervise.nodes import Allocation, end_fork_servers
from tests.ranks_launcher import cold_starts, run_command
from tests.states import state_of, wait_for

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(find_client() is None, reason="the program that stands for a rank was not compiled"),
]

PROGRAM = str(Path(__file__).with_name("forked_rank.py"))
FOLDER = Path(f"/dev/shm/hpctrain-fork-{os.geteuid()}")
LIMIT_S = 300
# Of the launch, not of the rank.
_OWN = "HPCTRAIN_FORKED_FOR"
_numbers = itertools.count()


@contextmanager
def a_key() -> Iterator[str]:
    """A key of which nothing is left afterwards."""
    key = f"test-{os.getpid()}-{next(_numbers)}"
    yield key
    wait_for(lambda: not list(FOLDER.glob(f"{key}-*")), says=lambda: list(FOLDER.glob(f"{key}-*")))


def forked(
    *words: str, key: str, lingers_s: float = 0.0, preload: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line of a client, and its variables."""
    updates: dict[str, str] = {}
    command = [sys.executable, *words]
    before, _ = plan_fork_server(
        ForkServer(key=key, lingers_s=lingers_s, preload=preload),
        command,
        environ=os.environ,
        ranks_on_a_node=1,
        updates=updates,
    )
    assert before
    return [*before, *command], {**os.environ, **updates}


def start(command: list[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def server_of(key: str) -> int:
    return int(next(iter(FOLDER.glob(f"{key}-*.lock"))).read_text())


def waiting_rank(key: str, directory: Path, case: str = "wait") -> tuple[subprocess.Popen[str], int]:
    """A client, and the rank that it stands for, which waits."""
    directory.mkdir()
    command, environ = forked(PROGRAM, case, str(directory / "pid"), key=key)
    client = start(command, environ)
    wait_for(lambda: (directory / "pid").exists() and bool((directory / "pid").read_text()))
    return client, int((directory / "pid").read_text())


def test_a_forked_process_has_all_that_a_started_one_has(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    cores = sorted(os.sched_getaffinity(0))

    def before() -> None:
        os.umask(0o027)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.sched_setaffinity(0, cores[-1:])
        os.setpgid(0, 0)
        os.dup2(reading, 7)

    words = (PROGRAM, "describe", "descriptor", "two words")
    found = []
    # Slurm sets it for some ranks of a node only.
    temporary = {"TMPDIR": str(tmp_path)}
    with a_key() as key:
        command, environ = forked(*words, key=key)
        for argv, variables in (
            ([sys.executable, *words], {**os.environ, **temporary}),
            (command, environ),
            (command, {**environ, **temporary}),
        ):
            os.write(writing, b"from the pipe")
            process = start(
                argv,
                variables,
                stdin=subprocess.PIPE,
                cwd=tmp_path,
                preexec_fn=before,
                pass_fds=(7,) if argv else (),
            )
            out, err = process.communicate("input\n", timeout=LIMIT_S)
            assert (process.returncode, err) == (0, "")
            found.append((process.pid, json.loads(out)))
    (_, cold), *warm = found
    assert cold["descriptor 7"] == "from the pipe"
    assert cold["status"]["Cpus_allowed_list"] == str(cores[-1])
    assert cold["temporary folder"] == str(tmp_path)
    first = warm[0][1]
    assert first["temporary folder"] != str(tmp_path)
    first["temporary folder"] = str(tmp_path)
    first["variables"] |= temporary
    first["shown variables"] = sorted([*first["shown variables"], f"TMPDIR={tmp_path}"])
    for client, rank in warm:
        assert rank["pid"] != client
        assert rank["variables"].pop(_OWN) == str(client)
        rank["shown variables"].remove(f"{_OWN}={client}")
        differ = {name for name in cold if cold[name] != rank[name]}
        assert differ == {"pid", "drawn"}, {name: (cold[name], rank[name]) for name in differ}
    drawn = [number for _, rank in found for number in rank["drawn"]]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("case", ["exit", "text", "raise", "none", "SIGKILL", "SIGSEGV", "SIGINT"])
def test_it_ends_as_it_would_have(case: str) -> None:
    cold = subprocess.run([sys.executable, PROGRAM, case], capture_output=True, text=True, timeout=LIMIT_S)
    with a_key() as key:
        command, environ = forked(PROGRAM, case, key=key)
        warm = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    if case != "SIGINT":  # its traceback also has the server's lines
        assert warm.stderr == cold.stderr


@pytest.mark.parametrize("variable", ["", "libm.so.6"])
def test_its_end_writes_what_is_in_buffers(variable: str, tmp_path: Path) -> None:
    # With h5py from before the fork.
    with a_key() as key:
        file = tmp_path / "left.h5"
        command, environ = forked(PROGRAM, "buffers", str(file), key=key, preload=("hpctrain.run.training",))
        environ["LD_PRELOAD"] = variable
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (6, "printed by C, registered in C\n", "")
    with h5py.File(file) as left:
        assert left["values"][:].tolist() == [0, 1, 2, 3, 4]


def test_modules_and_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __name__, __spec__.name)\n"
    )
    results = []
    for module in ("package", "package.__main__"):
        with a_key() as key:
            command, environ = forked("-m", module, "-x", key=key)
            for argv, variables in (
                ([sys.executable, "-m", module, "-x"], dict(os.environ)),
                (command, environ),
            ):
                done = subprocess.run(
                    argv, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
                )
                assert (done.returncode, done.stderr) == (0, "")
                results.append(done.stdout)
    assert results[0] == results[1]
    assert results[2] == results[3]


def test_the_client_and_the_rank_end_and_wait_together(tmp_path: Path) -> None:
    with a_key() as key:
        client, rank = waiting_rank(key, tmp_path / "killed")
        server = server_of(key)
        client.kill()
        wait_for(lambda: state_of(rank) in ("gone", "Z") and state_of(server) in ("gone", "Z"))
        client.communicate()
    with a_key() as key:
        client, rank = waiting_rank(key, tmp_path / "suspended", "handle")
        client.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(rank) == "T")
        client.send_signal(signal.SIGCONT)
        wait_for(lambda: state_of(rank) == "S")
        client.send_signal(signal.SIGTERM)
        out, err = client.communicate(timeout=LIMIT_S)
        assert (client.returncode, out, err) == (5, "at exit\n", "")
    with a_key() as key:
        client, rank = waiting_rank(key, tmp_path / "killed rank")
        # `hpctrain supervise` must not take the server for a rank of an earlier attempt.
        shown = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in (rank, server_of(key))}
        assert [b"HPCTRAIN_" in text for text in shown.values()] == [True, False]
        assert all(b"PATH=" in text for text in shown.values())
        os.kill(rank, signal.SIGKILL)
        assert client.wait(LIMIT_S) == -signal.SIGKILL
        client.communicate()


def test_the_end_of_the_server_is_the_end_of_its_ranks_and_a_suspended_one_holds_up_none(
    tmp_path: Path,
) -> None:
    with a_key() as key:
        client, rank = waiting_rank(key, tmp_path / "suspended", "handle")
        os.kill(server_of(key), signal.SIGTERM)  # a batch system's, to all processes of a job
        os.kill(server_of(key), signal.SIGSTOP)
        client.send_signal(signal.SIGTERM)
        assert client.wait(LIMIT_S) == 5
        client.communicate()
    key = f"test-{os.getpid()}-{next(_numbers)}"
    client, rank = waiting_rank(key, tmp_path / "killed", "handle")
    os.kill(server_of(key), signal.SIGKILL)
    _, err = client.communicate(timeout=LIMIT_S)
    assert client.returncode == -signal.SIGKILL
    assert f"the fork server of this node was ended, and with it process {rank}, a rank" in err
    wait_for(lambda: state_of(rank) in ("gone", "Z"))  # Z: process 1 of a container need not wait for it
    # The next server removes what it has left.
    with a_key() as other:
        command, environ = forked(PROGRAM, "exit", key=other)
        assert (
            subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, timeout=LIMIT_S).returncode == 3
        )
    assert not list(FOLDER.glob(f"{key}-*"))


def test_what_cannot_be_forked_starts_by_itself_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "named.py").write_text("import sys\nprint('a warning', file=sys.stderr)\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "print(os.environ.get('VALUE'), 'HPCTRAIN_FORKED_FOR' not in os.environ, 'named' in sys.modules)\n"
    )

    def run(key: str, *, preload: tuple[str, ...] = (), **variables: str) -> tuple[str, str]:
        command, environ = forked(str(program), key=key, lingers_s=60.0, preload=preload)
        done = subprocess.run(
            command,
            env={**environ, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
        )
        assert done.returncode == 0
        return done.stdout, done.stderr

    with a_key() as key:
        assert run(key) == ("None False False\n", "")
        out, err = run(key, VALUE="1")
        assert (out, "variable VALUE differs between ranks" in err) == (
            "1 True False\n",
            True,
        )
        assert run(key, SLURM_PROCID="1", CUDA_VISIBLE_DEVICES="3") == ("None False False\n", "")
        os.kill(server_of(key), signal.SIGKILL)
        assert run(key, HPCTRAIN_FORK_SERVER_LINGERS_S="0") == ("None False False\n", "")  # by the next one
    with a_key() as key:
        assert run(key, preload=("named",)) == ("None False True\n", "a warning\n")
        assert run(key, HPCTRAIN_FORK_SERVER_LINGERS_S="0") == ("None False True\n", "")  # printed once
    with a_key() as key:
        out, err = run(key, preload=("threads",), HPCTRAIN_FORK_SERVER_LINGERS_S="0")
        assert (out, "importing threads has started threads" in err) == ("None True False\n", True)
    with a_key() as key:
        out, err = run(key, preload=("no_such",), HPCTRAIN_FORK_SERVER_LINGERS_S="0")
        assert (out, "no_such cannot be imported before ranks are forked" in err) == (
            "None True False\n",
            True,
        )


def test_a_supervisor_ends_the_servers_that_wait_for_its_next_launch() -> None:
    host = socket.gethostname()
    with a_key() as key, a_key() as other:
        servers = {}
        for each in (key, other):
            command, environ = forked(PROGRAM, "exit", key=each, lingers_s=600.0)
            done = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
            assert done.returncode == 3
            servers[each] = server_of(each)
        here = Allocation(job="local", number=0, nodes=(host,), in_slurm=False)
        for ended in (key, other):
            assert state_of(servers[ended]) == "S"
            end_fork_servers(ended, [host], allocation=here, environ=os.environ)
            wait_for(lambda ended=ended: state_of(servers[ended]) in ("gone", "Z"))


def test_a_training_is_the_same_and_leaves_nothing(tmp_path: Path, packed_digits: Path) -> None:
    recipe = Path(__file__).parents[3] / "examples/digits.toml"
    launch = [sys.executable, "-m", "hpctrain.cli.main", "launch", "-n", "3"]
    script, module = [str(Path(sys.executable).with_name("hpctrain"))], [sys.executable, "-m", "hpctrain"]
    losses = []
    for name, before, hpctrain in (
        ("cold", [*launch, "--no-fork-server", "--"], script),
        ("warm", [*launch, "--"], module),
        ("mpirun", [], script),
    ):
        command = [
            *before, *hpctrain, "train", str(recipe), "--set", "run.epochs=1",
            "--set", f"run.directory={tmp_path / name}",
            "--set", f"data.train={packed_digits / 'train'}", "--set", f"data.held_out={packed_digits / 'test'}",
        ]  # fmt: skip
        with cold_starts():
            result = run_command(None if before else 3, command, env={KEY_VARIABLE: ""}, expect=0)
        assert ("ranks are forked from one process of each node" in result.stderr) == (name == "warm")
        assert "starts by itself" not in result.stderr
        lines = (tmp_path / name / "metrics/rank-00000.jsonl").read_text().splitlines()
        start = json.loads((tmp_path / name / "environment.json").read_text())["start"]
        assert start["forked"] == (name != "cold")
        assert start["seconds"] > 0
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] == losses[2]

    def remains() -> list[str]:
        """Names of files whose launcher has ended. They begin with its process number."""
        first = ((path.name, path.name.partition("-")[0]) for path in FOLDER.iterdir())
        return [name for name, number in first if number.isdigit() and state_of(int(number)) == "gone"]

    wait_for(lambda: not remains())


@pytest.mark.thorough
def test_kills_at_any_moment_leave_nothing_and_give_the_right_codes(tmp_path: Path) -> None:
    drawn = random.Random(7)
    for trial in range(int(os.environ.get("HPCTRAIN_TRIALS", "40"))):
        case = (drawn.choice(["client", "rank", "server"]), drawn.choice(["SIGKILL", "SIGTERM", "SIGSTOP"]))
        with a_key() as key:
            (tmp_path / key).mkdir()
            clients = []
            for number in range(2):
                command, environ = forked(PROGRAM, "wait", str(tmp_path / key / str(number)), key=key)
                clients.append(start(command, environ))
            delay_s = drawn.uniform(0, 0.5)
            wait_for(lambda key=key: len(list((tmp_path / key).iterdir())) == 2)  # type: ignore[misc]
            ranks = [int((tmp_path / key / str(number)).read_text() or 0) for number in range(2)]
            server = server_of(key)
            time.sleep(delay_s)
            number = signal.Signals[case[1]]
            os.kill(
                {"client": clients[0].pid, "rank": ranks[0] or clients[0].pid, "server": server}[case[0]],
                number,
            )
            expected = [-signal.SIGKILL, -signal.SIGKILL]
            if case == ("server", "SIGKILL"):
                pass
            elif case[0] != "server" and case[1] != "SIGSTOP":
                expected[0] = -number
                assert clients[0].wait(LIMIT_S) == -number, (trial, case)
                clients[1].send_signal(signal.SIGTERM)
                expected[1] = -signal.SIGTERM
            elif case[0] == "server":
                expected = [-signal.SIGTERM, -signal.SIGTERM]
                for client in clients:
                    client.send_signal(signal.SIGTERM)
            else:
                for client in clients:
                    client.kill()
            assert [client.wait(LIMIT_S) for client in clients] == expected, (trial, case)
            for client in clients:
                client.communicate()
            for pid in (*ranks, server):
                wait_for(lambda pid=pid: state_of(pid) in ("gone", "Z"))  # type: ignore[misc]
            if case == ("server", "SIGKILL"):
                command, environ = forked(PROGRAM, "exit", key=key)  # removes what is left
                subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
