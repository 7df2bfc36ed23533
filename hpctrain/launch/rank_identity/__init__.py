"""The identity of a rank: the table of launchers, the launcher's process, and containers that hide ranks."""
