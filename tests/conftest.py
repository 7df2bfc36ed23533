"""Settings for all tests: hypothesis has no time limits (the machine is shared) and always the same seeds."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hpctrain",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hpctrain")

# As from a terminal, however pytest was started: under `nohup ... &` these two come ignored, here and in all ranks.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def packed_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `train` and `test` that `hpctrain data pack digits` makes: to read, or to copy."""
    from tests.ranks_launcher import run_command

    where = tmp_path_factory.mktemp("digits")
    command = [sys.executable, "-m", "hpctrain.cli.main", "data", "pack", "digits", "digits"]
    run_command(None, command, cwd=where, expect=0)
    return where / "digits"


@pytest.fixture(autouse=True, scope="module")
def _cold_starts_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("cold") is None:
        yield
        return
    from tests.ranks_launcher import cold_starts

    with cold_starts():
        yield


@pytest.fixture(autouse=True)
def _sessions_are_closed() -> Iterator[None]:
    yield
    sessions = sys.modules.get("tests.sessions")
    if sessions is not None:
        sessions.close_sessions()


@pytest.hookimpl(trylast=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Raises pytest.UsageError that names a test module whose import starts MPI.

    The environment variables of a started MPI would reach all processes that the tests start later.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        raise pytest.UsageError(
            f"importing {report.nodeid} started MPI in pytest's own process: import mpi4py.MPI in a function"
        )
