"""A Prometheus and an Alertmanager of a test's own: on free loopback ports, in a folder, ended by their process ids.

They run with the files that `hpctrain export monitoring` writes; only times, addresses and places are the test's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

# .ci/run sets it to `required` where the programs can be installed: then a skipped test is an error.
VARIABLE = "HPCTRAIN_PROMETHEUS"
# Debian calls Alertmanager `prometheus-alertmanager`.
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")


def program(name: str) -> str:
    """Returns the path of one of PROGRAMS. Skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        text = f"{name} is not installed: apt-get install prometheus prometheus-alertmanager"
        if os.environ.get(VARIABLE) == "required":
            pytest.fail(text)
        pytest.skip(text)
    return found


def free_port() -> int:
    """Returns a port of the loopback address that nothing listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def configure(
    exported: Path, *, targets: Path, alertmanager: str | None = None, rules: Path | None = None
) -> Path:
    """Writes `test.yml` beside the exported prometheus.yml: the same, with a scrape a second, and returns its path.

    targets: folder of the files that name what to scrape. alertmanager: its host and port. rules: instead of the
    exported ones.
    """
    settings = yaml.safe_load((exported / "prometheus.yml").read_text())
    settings["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    if rules is not None:
        settings["rule_files"] = [str(rules)]
    if alertmanager is None:
        del settings["alerting"]
    else:
        settings["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    (scraped,) = settings["scrape_configs"]
    (discovered,) = scraped["file_sd_configs"]
    discovered |= {"files": [f"{targets}/*.json"], "refresh_interval": "1s"}
    path = exported / "test.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


class Server:
    """A server that is running, and its HTTP interface."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.address = address
        self._process, self._log = process, log

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the JSON answer to a request. Raises AssertionError with the log if there is none."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}?{query}", timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}?{query}: {error.read().decode()}") from error
        except OSError as error:
            raise AssertionError(f"{path}: {error}; it wrote:\n{self._log.read_text()[-2000:]}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series that Prometheus finds for an expression now, each with `metric` and `value`."""
        data = self.get("/api/v1/query", query=expression)["data"]
        found: list[dict[str, Any]] = data["result"]
        return found

    def wait_until_ready(self, *, timeout_s: float = 300) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5),
            ):
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, f"not ready after {timeout_s:g} s:\n{self._log.read_text()}"
            time.sleep(0.1)


@contextlib.contextmanager
def _serving(argv: Sequence[str], *, address: str, folder: Path, name: str) -> Iterator[Server]:
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        server = Server(address, process, log)
        server.wait_until_ready()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prometheus_argv(configuration: Path, *, data: Path, address: str) -> list[str]:
    """Returns the command line of a Prometheus that listens to `address`."""
    return [
        program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}",
    ]


@contextlib.contextmanager
def prometheus(configuration: Path, *, folder: Path) -> Iterator[Server]:
    """Runs Prometheus with a configuration; its data and its log are in `folder`."""
    address = f"127.0.0.1:{free_port()}"
    argv = prometheus_argv(configuration, data=folder / "prometheus", address=address)
    with _serving(argv, address=address, folder=folder, name="prometheus") as server:
        yield server


_ALERTMANAGER = {
    "route": {"receiver": "nobody", "group_wait": "1s", "group_interval": "1s"},
    "receivers": [{"name": "nobody"}],
}


@contextlib.contextmanager
def alertmanager(folder: Path) -> Iterator[Server]:
    """Runs an Alertmanager that keeps the alerts it receives and forwards none."""
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(_ALERTMANAGER))
    address = f"127.0.0.1:{free_port()}"
    argv = [
        program("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # it is alone
    ]
    with _serving(argv, address=address, folder=folder, name="alertmanager") as server:
        yield server
