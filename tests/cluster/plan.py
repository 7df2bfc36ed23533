"""What a cluster consists of: names, addresses, Slurm's configuration, commands. Pure.

A place is the head or a node. The head runs munged, slurmctld and the commands that are handed in, and holds
the bridge; each node runs a slurmd and hangs on the bridge by one link. Every place has its own process, UTS,
network and mount namespaces, so the names and addresses here never meet those of the machine or of another
cluster, and a temporary folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import gluster_volume
from tests.cluster.gluster_volume import Volume

HEAD = "hpct-head"
TMP = Path("/tmp")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
_NETWORK = "10.77.0"
_FIRST_NODE_ADDRESS = 10
MAX_NODES = 64
_MEMORY_MB = 64_000  # a number for Slurm's books, so that a script with --mem is not refused
# For Slurm's books too: it wants a device for each GPU, and opens none of them.
_GPU_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
_RATE = re.compile(r"\d+(\.\d+)?[kmg]bit")


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A cluster to bring up.

    directory: everything the cluster writes, logs included, and nothing else; goes when the cluster goes.
    rate: of each node's link, in both directions, as tc writes it (`200mbit`, `1gbit`); None: not shaped.
    cores_per_node: what Slurm is told; all nodes share the machine's real ones.
    volumes: of GlusterFS, stored by the nodes and mounted in every place.
    memory_group: folder of a control group, version 1, below which each node has one of its own. With it Slurm keeps
    jobs within their --mem; without it there are no control groups, as they belong to the machine.
    binds_tasks: Slurm binds each task to its cores (task/affinity). Then cores_per_node must not exceed the machine's.
    Raises ValueError when a field is out of range.
    """

    directory: Path
    num_nodes: int = 4
    rate: str | None = "1gbit"
    cores_per_node: int = 2
    volumes: tuple[Volume, ...] = ()
    memory_group: Path | None = None
    binds_tasks: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise ValueError(f"a cluster of {self.num_nodes} nodes: between 1 and {MAX_NODES} are possible")
        if self.cores_per_node < 1:
            raise ValueError(f"{self.cores_per_node} cores per node: at least 1")
        check_rate(self.rate)
        for volume in self.volumes:
            if self.num_nodes < volume.num_nodes_needed:
                raise ValueError(
                    f"a {volume.value} volume on {self.num_nodes} nodes: at least {volume.num_nodes_needed}"
                )
        if not self.directory.is_absolute():
            raise ValueError(f"the cluster's directory {self.directory} is not an absolute path")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"hpct{index}" for index in range(self.num_nodes))

    @property
    def addresses(self) -> dict[str, str]:
        """Address of every place, the head's included."""
        nodes = {
            name: f"{_NETWORK}.{_FIRST_NODE_ADDRESS + index}" for index, name in enumerate(self.node_names)
        }
        return {HEAD: f"{_NETWORK}.1", **nodes}

    @property
    def slurm_conf_path(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    def own_tmp(self, place: str) -> Path:
        """What a place has at /tmp, seen from outside."""
        return self.directory / "tmp" / place

    def gluster_log(self, place: str) -> Path:
        """Folder of what GlusterFS logs in a place."""
        return self.directory / "log" / f"gluster-{place}"


def check_rate(rate: str | None) -> None:
    """Raises ValueError when `rate` is none that tc understands as we mean it."""
    if rate is not None and not _RATE.fullmatch(rate):
        raise ValueError(f"rate {rate!r}: write a number and kbit, mbit or gbit, as in 200mbit")


def folders(plan: ClusterPlan) -> list[Path]:
    """The folders that must be there before the daemons start."""
    names = ["etc", "munge", "log", "state", "pid"]
    names += [f"spool/{node}" for node in plan.node_names]
    found = [plan.directory / name for name in names]
    found += [plan.own_tmp(place) for place in plan.addresses]
    if plan.volumes:
        found += [plan.gluster_log(place) / "bricks" for place in plan.addresses]
        found += gluster_volume.folders(plan.volumes, directory=plan.directory, node_names=plan.node_names)
    return found


def files(plan: ClusterPlan) -> Mapping[Path, str]:
    """Path -> text of the configuration."""
    etc = plan.directory / "etc"
    return {
        plan.slurm_conf_path: slurm_conf(plan),
        etc / "cgroup.conf": cgroup_conf(plan),
        etc / "gres.conf": "".join(f"Name=gpu File={device}\n" for device in _GPU_DEVICES),
        etc / "hosts": hosts_file(plan),
    }


def cgroup_conf(plan: ClusterPlan) -> str:
    """Only settings that Slurm 22.05, 24.11 and newer know: others are errors in the log of each step."""
    if plan.memory_group is not None:
        return "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
    return "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def hosts_file(plan: ClusterPlan) -> str:
    lines = [f"{address} {name}" for name, address in plan.addresses.items()]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""])


def slurm_conf(plan: ClusterPlan) -> str:
    directory = plan.directory
    settings = {
        "ClusterName": "hpct",
        "SlurmctldHost": f"{HEAD}({plan.addresses[HEAD]})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job waits as long as a credential lives: 10 s instead of 2 minutes.
        "AuthInfo": f"socket={plan.munge_socket},cred_expire=10",
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool" / "%n",
        # Each node's own /tmp; PMIx plugins of several slurmd would collide in one.
        "TmpFS": plan.own_tmp("%n"),
        "SlurmctldPidFile": directory / "pid" / "slurmctld",
        "SlurmdPidFile": directory / "pid" / "slurmd-%n",
        "SlurmctldLogFile": directory / "log" / "slurmctld.log",
        "SlurmdLogFile": directory / "log" / "slurmd-%n.log",
        "MpiDefault": "pmix",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": task_plugin(plan),
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core" if plan.memory_group is None else "CR_Core_Memory",
        "SlurmdParameters": "config_overrides",  # the nodes have as many cores as this file says
        "SchedulerParameters": "batch_sched_delay=0,bf_interval=1,sched_interval=1",
        "ReturnToService": "2",
        "KillWait": "5",
        "MinJobAge": "3600",  # a job is looked at long after its end where the machine is slow
        "SlurmdTimeout": "60",
        "MailProg": "/bin/true",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "GresTypes": "gpu",
    }
    nodes = [
        f"NodeName={name} NodeHostname={name} NodeAddr={plan.addresses[name]} "
        f"Sockets=1 CoresPerSocket={plan.cores_per_node} ThreadsPerCore=1 RealMemory={_MEMORY_MB} "
        f"Gres=gpu:{len(_GPU_DEVICES)} State=UNKNOWN"
        for name in plan.node_names
    ]
    on_all = f"Nodes={','.join(plan.node_names)} MaxTime=INFINITE State=UP"
    partitions = [
        f"PartitionName=all {on_all} Default=YES OverSubscribe=YES PriorityTier=2 PreemptMode=OFF",
        # Its jobs are sent away when those of the other need their cores; they have 30 s to save.
        f"PartitionName=preemptible {on_all} PriorityTier=1 PreemptMode=REQUEUE GraceTime=30",
    ]
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, *partitions, ""])


def task_plugin(plan: ClusterPlan) -> str:
    if plan.binds_tasks:
        return "task/affinity"
    return "task/none" if plan.memory_group is None else "task/cgroup"


def place_setup(plan: ClusterPlan, *, place: str, shared: Sequence[Path] = ()) -> list[list[str]]:
    """What the first process of a place runs before it reports. shared: see `tmp_setup`."""
    gluster = gluster_volume.place_setup(plan.gluster_log(place)) if plan.volumes else []
    return [
        *gluster,
        *memory_setup(plan, place=place),
        ["mount", "--bind", str(plan.directory / "etc" / "hosts"), "/etc/hosts"],
        # Ranks of two nodes must not meet in shared memory.
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "hpct-shm", "/dev/shm"],
        *tmp_setup(plan, place=place, shared=shared),
        ["ip", "link", "set", "lo", "up"],
    ]


def memory_setup(plan: ClusterPlan, *, place: str) -> list[list[str]]:
    """A node's own control groups for memory, where it looks for those of the machine."""
    if plan.memory_group is None or place == HEAD:
        return []
    group = str(plan.memory_group / place)
    return [["mkdir", group], ["mount", "--bind", group, str(MEMORY_GROUPS)]]


def tmp_setup(plan: ClusterPlan, *, place: str, shared: Sequence[Path]) -> list[list[str]]:
    """A /tmp that no other place sees, nor the machine.

    shared: folders that all see at the same path; nothing is done for those that do not lie under /tmp.
    """
    own = plan.own_tmp(place)
    commands = [["chmod", "1777", str(own)]]
    for folder in sorted({plan.directory, *shared}):  # what holds others comes before them
        if TMP in folder.parents:
            there = str(own / folder.relative_to(TMP))
            commands += [["mkdir", "-p", there], ["mount", "--rbind", str(folder), there]]
    return [*commands, ["mount", "--rbind", str(own), str(TMP)]]


def bridge_commands(plan: ClusterPlan) -> list[list[str]]:
    """In the head's network namespace."""
    return [
        ["ip", "link", "add", "bridge", "type", "bridge"],
        ["ip", "address", "add", f"{plan.addresses[HEAD]}/24", "dev", "bridge"],
        ["ip", "link", "set", "bridge", "up"],
    ]


def link_commands(*, node: str, pid: int) -> list[list[str]]:
    """In the head's network namespace. `pid`: a process of the node, as `ip` sees it."""
    return [
        ["ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
        ["ip", "link", "set", node, "master", "bridge"],
        ["ip", "link", "set", node, "up"],
    ]


# As on clusters, whatever this machine's own setting is. BBR sends so little at a time that the receiver's delayed
# acknowledgement, 40 ms, is waited for: 1 MiB over 200 Mbit/s then took 33 ms or 80.
_LOSS_BASED_TCP = (
    "for name in cubic reno; do "
    "echo $name > /proc/sys/net/ipv4/tcp_congestion_control && break; done 2> /dev/null || true"
)


def node_commands(plan: ClusterPlan, *, node: str) -> list[list[str]]:
    """In the node's network namespace, once its link is there."""
    return [
        ["sh", "-c", _LOSS_BASED_TCP],
        ["ip", "address", "add", f"{plan.addresses[node]}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
    ]


def shape_command(*, device: str, rate: str | None) -> list[str]:
    """Limit what leaves by `device` to `rate`; None: take the limit away.

    A shorter queue drops packets, and then TCP is measured instead of what runs above it. The burst is what passes at
    once: a millisecond's bytes at 1 Gbit/s, and more than one of the kernel's largest packets.
    """
    change = ["tc", "qdisc", "replace" if rate else "delete", "dev", device, "root"]
    return [*change, "tbf", "rate", rate, "burst", "128k", "latency", "200ms"] if rate else change


def bytes_sent(net_dev: str, *, device: str = "eth0") -> int:
    """Bytes that left by `device`, from the text of /proc/PID/net/dev."""
    for line in net_dev.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == device:
            return int(counters.split()[8])
    raise ValueError(f"no device {device} in /proc/net/dev")
