"""A whole set-up from an archive of `make bundle` where there is no network, and training with what came out of it.

Takes a quarter of an hour, since Horovod and h5py are compiled; `make trials-bundle` makes the archive and runs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ranks_launcher import rank_environment

BUNDLE = os.environ.get("HPCTRAIN_BUNDLE", "")

pytestmark = [
    pytest.mark.trials,
    pytest.mark.launches,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not BUNDLE, reason="HPCTRAIN_BUNDLE names no archive: `make trials-bundle`"),
]

# Runs "$@" where the only network is the loopback one, by which ranks find each other.
ISOLATED = """
ip link set lo up
[ "$(ip -o link | wc -l)" = 1 ] && [ -z "$(ip route)" ] || { echo "there is a network here"; exit 90; }
exec "$@"
"""


def run(words: list[str], *, cwd: Path, variables: Mapping[str, str]) -> str:
    """Runs a command in a network namespace of its own, prints how long it took, and returns what it printed."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    started = time.monotonic()
    done = subprocess.run(
        ["unshare", "--net", *user, "sh", "-c", ISOLATED, "sh", *words],
        cwd=cwd, env=dict(variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3000,
        check=False,
    )  # fmt: skip
    print(
        f"{' '.join(words)}: exit code {done.returncode}, {time.monotonic() - started:.0f} s\n{done.stdout[-6000:]}"
    )
    assert done.returncode == 0
    return done.stdout


def test_set_up_and_training_without_network(tmp_path: Path) -> None:
    for program in ("unshare", "ip", "make"):
        assert shutil.which(program), f"{program} is not installed"
    # By its own folder, without the archive: only the tree in it.
    with tarfile.open(BUNDLE) as archive:
        inside = [member for member in archive if member.name.startswith("hpctrain-bundle/tree")]
        archive.extractall(tmp_path, members=inside, filter="data")
    tree = tmp_path / "hpctrain-bundle" / "tree"
    # A user's shell: no environment is active, and nothing was built before.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")
    variables = {name: text for name, text in rank_environment().items() if name not in left_out}
    own = str(Path(sys.prefix) / "bin")
    variables["PATH"] = os.pathsep.join(p for p in variables["PATH"].split(os.pathsep) if p != own)
    variables |= {"HOME": str(tmp_path), "HPCTRAIN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    variables["PYTHON"] = os.path.realpath(sys.executable)

    said = run(["make", "setup", f"BUNDLE={BUNDLE}"], cwd=tree, variables=variables)
    assert re.search(r"building mpi4py .*\n", said)
    assert re.search(r"building horovod .*\n", said)
    assert re.search(r"building h5py .*\n", said)
    assert re.search(r"torch \S+, h5py \S+ \(parallel\), Horovod \(MPI", said)
    # The archive is not needed any more.
    assert "already set up" in run(["make", "setup"], cwd=tree, variables=variables)

    hpctrain = str(tree / ".venv" / "bin" / "hpctrain")
    run([hpctrain, "data", "pack", "digits", "data/digits"], cwd=tree, variables=variables)
    train = ["launch", "-n", "2", "--", hpctrain, "train", "examples/digits.toml"]
    run([hpctrain, *train], cwd=tree, variables=variables)
    summary = json.loads((tree / "runs" / "digits" / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["quality"]["accuracy"] > 0.95

    said = run(["make", "demo"], cwd=tree, variables=variables)
    assert "already set up" in said
