"""Simulators: reductions over all ranks, and a job's failures, checkpoints and restarts."""
