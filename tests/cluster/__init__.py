"""A real Slurm cluster on one machine: `Cluster` for tests and benchmarks, `python -m tests.cluster` by hand."""

from tests.cluster.cluster import Cluster, JobEnd
from tests.cluster.plan import ClusterPlan
from tests.cluster.record import ClusterError, Lifetime
from tests.cluster.requirements import why_not

__all__ = ["Cluster", "ClusterError", "ClusterPlan", "JobEnd", "Lifetime", "why_not"]
