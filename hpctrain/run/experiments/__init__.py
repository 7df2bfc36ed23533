"""Experiments that compare runs of one training: on one rank and on all, in micro-batches, resumed and repeated."""
