"""Starts ranks by forking them from one process per node that has already imported their libraries.

See docs/guides/starting.md.
"""
