"""The command `hpctrain check`."""
