"""A real Slurm cluster on one machine: `Cluster` for tests and benchmarks, `python -m tests.cluster` by hand."""

from tests.cluster.cluster import Cluster, JobEnd
from tests.cluster.gluster_volume import Volume
from tests.cluster.plan import ClusterPlan
from tests.cluster.record import ClusterError, Lifetime
from tests.cluster.requirements import why_no_volumes, why_not

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterPlan",
    "JobEnd",
    "Lifetime",
    "Volume",
    "why_no_volumes",
    "why_not",
]
