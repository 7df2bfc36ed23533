"""Real ranks tell Prometheus their metrics: the endpoint of each node, the file that lists them, and text files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ExitCode
from hpctrain.telemetry import read_records
from tests.ranks_launcher import Launched, start_command
from tests.run_files import losses_of
from tests.states import wait_for

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
# .ci/run sets it to `required`: then a test without Prometheus' programs is an error.
VARIABLE = "HPCTRAIN_PROMETHEUS"
RECIPE = """
[run]
name = "digits"
directory = "run"
steps = 100000
[task]
target = "tests.faults.faulty_tasks:Slow"
[data]
train = "data/train"
held_out = "data/test"
global_batch = 64
[optimizer]
lr = 1e-3
[reduction]
algorithm = "direct"
[checkpoint]
every_steps = 20
[telemetry]
evaluate_every_steps = 10
[stragglers]
window_s = 0.5
"""
NUM_STEPS = 60  # after which a launch is looked at


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("metrics-out")
    with start_command(None, [HPCTRAIN, "data", "pack", "digits", "data"], cwd=where) as packing:
        assert packing.wait(timeout_s=300).returncode == 0
    (where / "recipe.toml").write_text(RECIPE)
    return where


@contextmanager
def training(where: Path, name: str, *words: str) -> Iterator[Launched]:
    """Two ranks on two emulated nodes, while they train; they are stopped at the end of the block."""
    sets = [word for text in (f"run.directory={name}", *words) for word in ("--set", text)]
    command = [HPCTRAIN, "launch", "-n", "2", "--", "hpctrain", "train", "recipe.toml", *sets]
    with start_command(None, command, env={"HPCTRAIN_RANKS_PER_NODE": "1"}, cwd=where) as launched:
        yield launched
        launched.process.send_signal(signal.SIGTERM)
        ended = launched.wait(timeout_s=300)
        assert ended.returncode == ExitCode.STOPPED_EARLY, ended.stdout + ended.stderr


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return str(answer.read().decode())


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None and os.environ.get(VARIABLE) == "required":
        pytest.fail(f"{VARIABLE}=required, and {name} is not installed (Debian's package prometheus)")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return found


def values(text: str, name: str) -> list[float]:
    return [float(v) for v in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, flags=re.MULTILINE)]


@pytest.fixture(scope="module")
def exposed(where: Path) -> dict[str, Any]:
    """What one run with endpoints showed: the list of targets, each target's text, what Prometheus made of it."""
    found: dict[str, Any] = {}
    directory = where / "endpoints"
    listed = directory / "metrics" / "prometheus"
    with training(where, "endpoints", "telemetry.prometheus=endpoint") as launched:
        wait_for(lambda: len(list(losses_of(directory))) >= NUM_STEPS, launched=launched)
        (path,) = listed.iterdir()
        (found["entry"],) = json.loads(path.read_text())
        found["texts"] = [get(f"http://{target}/metrics") for target in found["entry"]["targets"]]
        if shutil.which("prometheus") is not None:
            found["prometheus"] = prometheus_sees(where, listed, launched)
    found["left"] = list(listed.iterdir())
    found["records"] = list(read_records(directory / "metrics" / "rank-00000.jsonl"))
    return found


def prometheus_sees(where: Path, listed: Path, launched: Launched) -> dict[str, Any]:
    """Starts Prometheus with the guide's configuration on the run's list of targets, and asks it."""
    config = where / "prometheus.yml"
    scrape = {
        "job_name": "hpctrain",
        "honor_labels": True,
        "file_sd_configs": [{"files": [f"{listed}/*.json"], "refresh_interval": "1s"}],
    }
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    log = where / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={config}", f"--storage.tsdb.path={where / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output, stderr=output,
        )  # fmt: skip
    try:

        def ask(query: str) -> list[dict[str, Any]]:
            try:
                answer = get(f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}")
            except OSError:  # it still starts
                assert process.poll() is None, log.read_text()
                return []
            return list(json.loads(answer)["data"]["result"])

        rates = wait_for(lambda: ask("rate(hpctrain_steps_total[10s]) > 0"), launched=launched)
        return {
            "rates": rates,
            "up": ask('up{job="hpctrain"}'),
            "info": ask("hpctrain_run_info"),
            "p95": ask(
                "histogram_quantile(0.95, sum by (le, run) (rate(hpctrain_step_seconds_bucket[10s])))"
            ),
        }
    finally:
        process.terminate()
        process.wait(300)


def test_each_node_has_an_endpoint_and_only_rank_0_speaks_for_the_run(exposed: dict[str, Any]) -> None:
    first, second = exposed["texts"]
    for rank, text in enumerate((first, second)):
        assert values(text, "hpctrain_step_seconds_count")[0] >= NUM_STEPS - 20
        assert f'hpctrain_step_seconds_count{{rank="{rank}"}}' in text
        assert sum(values(text, "hpctrain_step_part_seconds_total")) == pytest.approx(
            values(text, "hpctrain_step_seconds_sum")[0], rel=1e-3
        )
        # It communicates all the time, and one rank per node sends the gradients to the other node.
        assert time.time() - values(text, "hpctrain_last_collective_timestamp_seconds")[0] < 600
        assert values(text, "hpctrain_sent_bytes_total")[0] > 1e5
        assert values(text, "hpctrain_cpu_seconds_total")[0] > 0.5
    assert values(first, "hpctrain_ranks") == [2]
    assert values(first, "hpctrain_nodes") == [2]
    assert values(first, "hpctrain_checkpoints_committed_total")[0] >= 2
    assert values(first, "hpctrain_ranks_part_seconds_total")  # from a window of the efficiencies
    assert values(first, "hpctrain_node_seconds_total")[0] > 2
    for name in ("hpctrain_loss", "hpctrain_step", "hpctrain_run_info"):
        assert values(first, name)
        assert not values(second, name)


def test_what_is_exposed_is_what_is_recorded(exposed: dict[str, Any]) -> None:
    text = exposed["texts"][0]
    step = int(values(text, "hpctrain_step")[0])
    records = {record["step"]: record for record in exposed["records"] if record["kind"] == "step"}
    assert values(text, "hpctrain_loss") == [records[step]["loss"]]
    assert values(text, "hpctrain_samples_total") == [records[step]["global_samples"]]
    seconds = [records[number]["seconds"]["step"] for number in range(1, step + 1)]
    assert values(text, "hpctrain_step_seconds_sum")[0] == pytest.approx(sum(seconds))


def test_the_list_of_targets_is_there_as_long_as_the_run(exposed: dict[str, Any]) -> None:
    entry = exposed["entry"]
    assert set(entry) == {"targets", "labels"}
    assert len(set(entry["targets"])) == 2
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", target) for target in entry["targets"])
    assert entry["labels"]["run"] == "digits"
    assert re.fullmatch("[0-9a-f]{12}", entry["labels"]["run_id"])
    assert exposed["left"] == []


def test_promtool_finds_nothing_wrong(exposed: dict[str, Any]) -> None:
    promtool = program("promtool")
    for text in exposed["texts"]:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prometheus_finds_the_ranks_through_the_file_and_computes_rates(exposed: dict[str, Any]) -> None:
    program("prometheus")
    seen = exposed["prometheus"]
    assert [result["value"][1] for result in seen["up"]] == ["1", "1"]
    run_id = exposed["entry"]["labels"]["run_id"]
    (rate,) = seen["rates"]
    assert {name: rate["metric"][name] for name in ("run", "run_id")} == {"run": "digits", "run_id": run_id}
    assert 0.5 < float(rate["value"][1]) < 51  # a step takes at least 20 ms
    (info,) = seen["info"]
    assert info["metric"]["algorithm"] == "direct"
    assert info["metric"]["run_id"] == run_id
    assert not [name for name in info["metric"] if name.startswith("exported_")]
    (p95,) = seen["p95"]
    assert 0.02 < float(p95["value"][1]) < 10


def test_text_files_tell_of_all_starts_and_a_directory_that_vanishes_is_one_warning(where: Path) -> None:
    folder, directory = where / "textfiles", where / "texts"
    folder.mkdir()
    words = [
        "telemetry.prometheus=textfile", f"telemetry.prometheus_directory={folder}",
        "telemetry.prometheus_every_s=0.2",
    ]  # fmt: skip
    with training(where, "texts", *words) as launched:
        wait_for(lambda: len(list(losses_of(directory))) >= 5, launched=launched)
        assert len(list(folder.glob("*.prom"))) == 2
    assert list(folder.iterdir()) == []
    stopped_at = list(losses_of(directory))[-1]
    with training(where, "texts", *words) as launched:
        wait_for(lambda: list(losses_of(directory))[-1] > stopped_at, launched=launched)
        (path,) = folder.glob("*-rank-00000.prom")
        text = wait_for(
            lambda: (t := path.read_text()) and values(t, "hpctrain_steps_total") > [0.0] and t,
            launched=launched,
        )
        folder.rename(where / "elsewhere")
        wait_for(lambda: launched.stderr.count("off from now on") == 2, launched=launched)
        seen = list(losses_of(directory))[-1]
        wait_for(lambda: list(losses_of(directory))[-1] > seen + 5, launched=launched)
    assert value_of(text, "hpctrain_starts_total") == 2
    assert value_of(text, "hpctrain_resumes_completed_total") == 1
    assert value_of(text, "hpctrain_lost_steps_total") == 0
    assert re.search(
        r'^hpctrain_stops_total\{reason="signal",run="digits",[^}]*\} 1\.0$', text, flags=re.MULTILINE
    )
    assert values(text, "hpctrain_step")[0] > stopped_at


def value_of(text: str, name: str) -> float:
    (value,) = values(text, name)
    return value


def test_a_port_that_is_in_use_is_one_warning_a_rank(where: Path) -> None:
    directory, targets = where / "port", where / "targets"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["telemetry.prometheus=endpoint", f"telemetry.prometheus_port={port}"]
        with training(where, "port", *words, f"telemetry.prometheus_targets={targets}") as launched:
            wait_for(lambda: len(list(losses_of(directory))) >= 5, launched=launched)
            warning = f"the Prometheus endpoint could not be opened: 127.0.0.1:{port}: Address already in use"
            assert launched.stderr.count(warning) == 2
            assert not targets.exists()
