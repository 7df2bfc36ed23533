"""The volumes of GlusterFS that a cluster may have: which nodes store them, and the commands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path


class Volume(str, Enum):
    """DISTRIBUTED: a brick on every node, every file whole in one of them; what a lost brick holds is gone.

    DISPERSED: bricks on the first three nodes, every file in all of them, 2 parts data and 1 redundancy: any
    one brick may be lost.
    """

    DISTRIBUTED = "distributed"
    DISPERSED = "dispersed"

    @property
    def num_nodes_needed(self) -> int:
        return 3 if self is Volume.DISPERSED else 1

    def servers(self, node_names: Sequence[str]) -> tuple[str, ...]:
        """The nodes that have a brick of it."""
        return tuple(node_names[:3] if self is Volume.DISPERSED else node_names)

    def brick(self, directory: Path, *, node: str) -> Path:
        """Where a node keeps its brick, on the machine's own filesystem."""
        return directory / "bricks" / node / self.value

    def mount_point(self, directory: Path) -> Path:
        """Where it is mounted in every place: an empty folder for all who look from outside."""
        return directory / "volumes" / self.value

    def create(self, directory: Path, *, node_names: Sequence[str]) -> list[str]:
        kind = ["disperse", "3", "redundancy", "1"] if self is Volume.DISPERSED else []
        bricks = [f"{node}:{self.brick(directory, node=node)}" for node in self.servers(node_names)]
        # force: the bricks are folders of the root filesystem.
        return [*_GLUSTER, "volume", "create", self.value, *kind, *bricks, "force"]

    def start(self, *, again: bool = False) -> list[str]:
        """Start it; `again`: only the bricks that have ended."""
        return [*_GLUSTER, "volume", "start", self.value, *(["force"] if again else [])]

    def mount(self, directory: Path, *, server: str) -> list[str]:
        """In every place, once the volume has been started."""
        log = f"--log-file={LOG_FOLDER}/mount-{self.value}.log"
        names = [f"--volfile-server={server}", f"--volfile-id={self.value}"]
        return ["glusterfs", *names, "--log-level=WARNING", log, str(self.mount_point(directory))]

    def connections(self, directory: Path) -> str:
        """Pattern of the files, in a place where it is mounted, that tell of the connection to each brick."""
        return f"{self.mount_point(directory)}/.meta/graphs/active/{self.value}-client-*/private"

    def is_served_by(self, words: Sequence[bytes], *, node: str) -> bool:
        """Whether a process with this command line is the server of the node's brick."""
        if not words or Path(words[0].decode(errors="replace")).name != "glusterfsd":
            return False
        return any(word.startswith(f"{self.value}.{node}.".encode()) for word in words)


_GLUSTER = ["gluster", "--mode=script"]
LOG_FOLDER = "/var/log/glusterfs"
DAEMON = ["glusterd", "--log-level=WARNING"]


def probe(node: str) -> list[str]:
    """On the first node: take another one into the pool."""
    return [*_GLUSTER, "peer", "probe", node]


def pool() -> list[str]:
    """What a node knows of the pool: a line with `Connected` for itself and each peer that it can talk to."""
    return [*_GLUSTER, "pool", "list"]


def place_setup(log: Path) -> list[list[str]]:
    """In each place before anything else: the folders whose names are built into GlusterFS become its own.

    In memory, but for the logs: there is much small fsync in them, and they go with the place.
    """
    return [
        ["mount", "-t", "tmpfs", "-o", "mode=755", "hpct-run", "/run"],
        ["mkdir", "/run/gluster"],
        ["mount", "-t", "tmpfs", "-o", "mode=755", "hpct-glusterd", "/var/lib/glusterd"],
        ["mount", "--bind", str(log), LOG_FOLDER],
    ]


def folders(volumes: Iterable[Volume], *, directory: Path, node_names: Sequence[str]) -> list[Path]:
    """The folders of the machine that must be there first."""
    return [
        folder
        for volume in volumes
        for folder in (
            volume.mount_point(directory),
            *(volume.brick(directory, node=node) for node in volume.servers(node_names)),
        )
    ]
