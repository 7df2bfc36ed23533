"""The command group `hpctrain bench`."""
