"""Schedules of synchronisation: the ranks update parameters alone, and average them after a number of steps."""
