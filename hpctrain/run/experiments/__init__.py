"""Experiments that compare a training with itself: on other numbers of ranks, in micro-batches, resumed, repeated."""
