"""`python -m tests.cluster up|down|status|run`: a Slurm cluster on this machine, by hand."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from tests.cluster.cluster import CLUSTERS, Cluster
from tests.cluster.gluster_volume import Volume
from tests.cluster.plan import HEAD, ClusterPlan
from tests.cluster.record import ClusterError, Lifetime, Record, end, only_one


def main(words: list[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    directory = CLUSTERS / arguments.name
    try:
        return int(arguments.action(arguments, directory))
    except (ClusterError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _up(arguments: argparse.Namespace, directory: Path) -> int:
    plan = ClusterPlan(
        directory=directory,
        num_nodes=arguments.nodes,
        rate=None if arguments.rate == "none" else arguments.rate,
        cores_per_node=arguments.cores_per_node,
        volumes=tuple(Volume) if arguments.gluster else (),
    )
    cluster = Cluster.up(plan, lifetime=Lifetime.KEPT)
    shaped = f"links of {plan.rate}" if plan.rate else "links not shaped"
    print(f"up: {cluster.node_names[0]} to {cluster.node_names[-1]}, {shaped}. Try:")
    for volume in plan.volumes:
        print(f"{volume.value} volume, seen by all that runs on the cluster: {cluster.volume(volume)}")
    print("  python -m tests.cluster run -- sinfo")
    print(f"  python -m tests.cluster run -- srun --nodes={plan.num_nodes} hostname")
    return 0


def _down(arguments: argparse.Namespace, directory: Path) -> int:
    with only_one(directory):
        there = Record.read(directory) is not None
        end(directory)
    print(f"down: {arguments.name}" if there else f"no cluster of the name {arguments.name}")
    return 0


def _status(arguments: argparse.Namespace, directory: Path) -> int:
    record = Record.read(directory)
    if record is None:
        print(f"no cluster of the name {arguments.name}")
        return 1
    print(f"{arguments.name}: {record.num_nodes} nodes, rate {record.rate or 'not shaped'}, in {directory}")
    for place, process in record.places.items():
        print(f"  {place}: first process {process.pid}, {'alive' if process.alive else 'GONE'}")
    if not record.places or not all(process.alive for process in record.places.values()):
        print("not up; `down` removes what is left")
        return 1
    cluster = Cluster.attach(directory)
    for volume in cluster.plan.volumes:
        print(f"  {volume.value} volume: {cluster.volume(volume)}")
    for node, sent in cluster.bytes_sent().items():
        print(f"  {node}: {sent / 1e6:.1f} MB sent, {len(cluster.processes(node))} processes")
    for question in (["sinfo", "--Node", "--long"], ["squeue"]):
        print(cluster.run(question, timeout_s=300).stdout, end="")
    return 0


def _run(arguments: argparse.Namespace, directory: Path) -> NoReturn:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ClusterError("no command to run: `python -m tests.cluster run -- srun hostname`")
    cluster = Cluster.attach(directory)
    argv = cluster.argv(command, cwd=Path.cwd(), place=arguments.place)
    environ = cluster.environment()
    os.execvpe(argv[0], argv, environ)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    up = actions.add_parser("up", help="bring a cluster up; one of the same name is taken down first")
    up.add_argument("--nodes", type=int, default=4, metavar="N")
    up.add_argument("--rate", default="1gbit", help="of each node's link, as tc writes it; none: not shaped")
    up.add_argument(
        "--cores-per-node", type=int, default=os.cpu_count() or 1, metavar="N", help="what Slurm is told"
    )
    up.add_argument(
        "--gluster",
        action="store_true",
        help="with two volumes of GlusterFS, one distributed, one dispersed 2+1",
    )
    run = actions.add_parser("run", help="run a command on the head, or on a node")
    run.add_argument("--place", default=HEAD, help=f"{HEAD} (the default), hpct0, hpct1, ...")
    run.add_argument("command", nargs=argparse.REMAINDER)
    down = actions.add_parser("down", help="end it, and only what it started")
    status = actions.add_parser("status", help="what runs, and what was sent")
    for action, function in ((up, _up), (down, _down), (status, _status), (run, _run)):
        action.add_argument(
            "--name", default="default", help="several clusters may be up under several names"
        )
        action.set_defaults(action=function)
    return parser


if __name__ == "__main__":
    sys.exit(main())
