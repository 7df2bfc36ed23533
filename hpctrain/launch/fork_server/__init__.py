"""Ranks are forked from one process of each node that has imported their libraries: docs/guides/starting.md."""
