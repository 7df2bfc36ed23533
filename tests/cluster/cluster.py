"""`Cluster`: bring one up, run commands on it, count its bytes, break its links, take it down."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch.placement import give_way_while_waiting
from hpctrain.launch.yielding import find_yield_library
from tests.cluster.daemons import start_daemons, start_slurmd
from tests.cluster.gluster import brick_server, start_bricks, start_gluster
from tests.cluster.gluster_volume import Volume
from tests.cluster.namespaces import Ties, connect_places, enter, make_places, run_all, shape_link
from tests.cluster.plan import HEAD, ClusterPlan, bytes_sent, check_rate, files, folders
from tests.cluster.record import (
    ClusterError,
    Lifetime,
    Process,
    Record,
    end,
    namespace_of,
    only_one,
    processes_in,
)
from tests.cluster.requirements import search_path, why_no_volumes, why_not
from tests.ranks_launcher import rank_environment

# Not /tmp, where others may write; not /run, from which nothing may be executed on some systems.
CLUSTERS = Path("/var/lib/hpctrain-clusters")


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a batch job ended. `exit_code`: of its script; `signal`: that ended it, or 0."""

    state: str
    exit_code: int
    signal: int
    num_restarts: int


class Cluster:
    """A cluster that is up. Made by `up` or found by `attach`; as a context manager it goes down at the end."""

    def __init__(self, plan: ClusterPlan, record: Record, *, ties: Ties | None = None) -> None:
        self.plan = plan
        self._record = record
        self._ties = ties or Ties()

    @classmethod
    def up(
        cls, plan: ClusterPlan, *, lifetime: Lifetime = Lifetime.OWNER, shared: Sequence[Path] = ()
    ) -> Cluster:
        """Bring a cluster up; what is left of an earlier one in the same directory is taken down first.

        With Lifetime.OWNER it ends with this process, also when that is killed. shared: folders under /tmp that
        all places see; the rest of it is each place's own. Raises ClusterError.
        """
        reason = why_not()
        if reason is not None:
            raise ClusterError(reason)
        with only_one(plan.directory):
            if plan.volumes and (reason := why_no_volumes(plan.directory.parent)) is not None:
                raise ClusterError(reason)
            end(plan.directory)
            for folder in folders(plan):
                folder.mkdir(parents=True)
            record = Record(
                num_nodes=plan.num_nodes,
                rate=plan.rate,
                cores_per_node=plan.cores_per_node,
                lifetime=lifetime,
                owner=Process.of(os.getpid()),
                volumes=[volume.value for volume in plan.volumes],
            )
            record.write(plan.directory)
            for path, text in files(plan).items():
                path.write_text(text)
            ties = Ties()
            try:
                make_places(plan, record, ties=ties, shared=shared)
                connect_places(plan, record)
                start_daemons(plan, record)
                if plan.volumes:
                    start_gluster(plan, record)
                record.ready = True
                record.write(plan.directory)
            except BaseException:
                end(plan.directory)
                ties.loosen()
                raise
        return cls(plan, record, ties=ties)

    @classmethod
    def attach(cls, directory: Path) -> Cluster:
        """The cluster that another process has brought up in `directory`. Raises ClusterError."""
        record = Record.read(directory)
        if record is None or not all(process.alive for process in record.places.values()):
            raise ClusterError(f"no cluster is up in {directory}")
        plan = ClusterPlan(
            directory=directory,
            num_nodes=record.num_nodes,
            rate=record.rate,
            cores_per_node=record.cores_per_node,
            volumes=tuple(Volume(name) for name in record.volumes),
        )
        return cls(plan, record)

    def down(self) -> None:
        """End all of it and remove its directory. May be called again."""
        with only_one(self.plan.directory):
            end(self.plan.directory)
        self._ties.loosen()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    # ---- commands

    def argv(
        self, command: Sequence[str], *, cwd: Path, place: str = HEAD, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command line that runs `command` at a place; for Popen together with `environment`."""
        extra = [f"{name}={value}" for name, value in (env or {}).items()]
        # nsenter passes no signals on: at least its end is passed on.
        tied = ["setpriv", "--pdeathsig", "TERM", "env", f"--chdir={cwd}", *extra]
        return [*enter(self._record.places[place]), *tied, *command]

    def environment(self) -> dict[str, str]:
        """Ours, without an outer launcher's variables, with this cluster's Slurm, this Python and each place's /tmp.

        Neither Slurm nor a rank can see that all nodes share this machine's cores: what `hpctrain launch` sets where
        ranks outnumber cores is set here.
        """
        # The ring: see slurm/train.sbatch.
        slurm = {"SLURM_CONF": str(self.plan.slurm_conf_path), "SLURM_PMIX_FENCE": "ring"}
        environ = {k: v for k, v in rank_environment(slurm).items() if k not in ("TMPDIR", "TEMP", "TMP")}
        give_way_while_waiting(environ, updates=environ, library=find_yield_library(), notes=[])
        environ["PATH"] = f"{Path(sys.executable).parent}:{search_path()}"
        return environ

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: Path | None = None,
        place: str = HEAD,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command at a place and wait for it. What of it still runs at `timeout_s` is killed.

        Raises subprocess.TimeoutExpired then.
        """
        process = subprocess.Popen(
            self.argv(command, cwd=cwd or Path.cwd(), place=place, env=env),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(), start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)

    # ---- jobs

    def submit(self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """`sbatch WORDS` from `cwd`; the job's number. Raises ClusterError when Slurm refuses it."""
        done = self.run(["sbatch", "--parsable", *words], timeout_s=300, cwd=cwd, env=env)
        if done.returncode != 0:
            raise ClusterError(f"sbatch {' '.join(words)}: {done.stderr.strip()}")
        return int(done.stdout.split(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` tells, by name."""
        done = self.run(["scontrol", "show", "job", "--oneliner", str(job_id)], timeout_s=300)
        if done.returncode != 0:
            raise ClusterError(f"scontrol show job {job_id}: {done.stderr.strip()}")
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def wait_for(self, job_id: int, *, timeout_s: float) -> JobEnd:
        """Wait for the end of a job, through its requeues. Raises ClusterError when it lasts longer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            facts = self.job(job_id)
            if facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                code, _, number = facts["ExitCode"].partition(":")
                return JobEnd(
                    state=facts["JobState"],
                    exit_code=int(code),
                    signal=int(number),
                    num_restarts=int(facts["Restarts"]),
                )
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"job {job_id} is {facts['JobState']} ({facts['Reason']}) after {timeout_s:.0f} s"
                )
            time.sleep(0.2)

    # ---- links and nodes

    @property
    def node_names(self) -> tuple[str, ...]:
        return self.plan.node_names

    def bytes_sent(self) -> dict[str, int]:
        """Bytes that have left each node by its link, headers and Slurm's own traffic included."""
        return {
            node: bytes_sent(Path(f"/proc/{self._record.places[node].pid}/net/dev").read_text())
            for node in self.node_names
        }

    def set_rate(self, rate: str | None) -> None:
        """Shape every link anew, both directions. None: as fast as the machine is."""
        check_rate(rate)
        for node in self.node_names:
            if rate is not None or self._record.rate is not None:
                shape_link(self._record, node=node, rate=rate)
        self._record.rate = rate
        self._record.write(self.plan.directory)

    def set_link_rate(self, node: str, rate: str) -> None:
        """Shape one node's link anew, both directions; `set_rate` shapes it like the others again."""
        check_rate(rate)
        shape_link(self._record, node=node, rate=rate)

    def cut_link(self, node: str) -> None:
        """Pull the node's cable."""
        self._set_link(node, "down")

    def mend_link(self, node: str) -> None:
        """Put it back."""
        self._set_link(node, "up")

    def _set_link(self, node: str, state: str) -> None:
        in_head = enter(self._record.places[HEAD], kinds=["--net"])
        run_all(in_head, [["ip", "link", "set", node, state]])

    def start_slurmd(self, node: str) -> None:
        """Start the node's daemon again after it was killed."""
        start_slurmd(self.plan, self._record, node=node)

    def kill_node(self, node: str, *, lost: Sequence[str] = ()) -> None:
        """Kill all that runs on the node, its slurmd included, at once; `start_slurmd` brings it back.

        lost: folders in its /tmp that are gone with it.
        """
        first = self._record.places[node]
        inside = namespace_of(first.pid, "pid")
        for pid in processes_in({inside}, "pid"):
            if pid != first.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in lost:
            shutil.rmtree(self.plan.own_tmp(node) / name, ignore_errors=True)

    # ---- volumes

    def volume(self, volume: Volume) -> Path:
        """Where a volume of GlusterFS is mounted in every place; from outside an empty folder."""
        return volume.mount_point(self.plan.directory)

    def brick_server(self, volume: Volume, *, node: str) -> Process:
        """The process that serves a node's brick of a volume. Raises ClusterError when there is none."""
        return brick_server(self._record, volume=volume, node=node)

    def start_bricks(self, volume: Volume) -> None:
        """Start what serves a volume again, where it has ended."""
        start_bricks(self.plan, self._record, volume=volume)

    def processes(self, place: str | None = None) -> list[int]:
        """Process ids, as this process sees them, of all that runs at a place, or anywhere on the cluster."""
        places = self._record.places if place is None else [place]
        return processes_in({self._record.namespaces[name] for name in places})

    def ranks(self, job: int, place: str | None = None) -> dict[int, int]:
        """World rank -> process id, as this process sees it, of the ranks that srun or mpirun has started in a job: at
        a place, or anywhere on the cluster."""
        found: dict[int, int] = {}
        for pid in self.processes(place):
            rank = _rank_of(pid, job=job)
            if rank is not None:
                found[rank] = min(pid, found.get(rank, pid))  # a rank's children carry its variables too
        return found

    def same_namespace(self, pid: int, *, place: str) -> bool:
        """Whether a process runs at a place."""
        return namespace_of(pid, "net") == self._record.namespaces[place]

    def logs(self, *, num_lines: int = 20) -> str:
        """The last lines of every daemon's log."""
        parts = []
        folder = self.plan.directory / "log"
        for path in sorted(folder.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            if path.parent != folder:  # GlusterFS tells much that is no error
                lines = [line for line in lines if "] E [" in line or "] C [" in line]
            if lines:
                parts.append("\n".join([f"--- {path.relative_to(folder)}", *lines[-num_lines:]]))
        return "\n".join(parts)


def _rank_of(pid: int, *, job: int) -> int | None:
    """Rank of a Python process that mpirun or a step of several tasks has started in a job; None for any other."""
    try:
        if b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return None
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    environ = dict(item.partition(b"=")[::2] for item in items)
    if environ.get(b"SLURM_JOB_ID") != str(job).encode():
        return None
    if b"OMPI_COMM_WORLD_RANK" in environ:
        return int(environ[b"OMPI_COMM_WORLD_RANK"])
    return int(environ[b"PMIX_RANK"]) if b"PMIX_RANK" in environ and b"SLURM_PROCID" in environ else None
