"""The command group `hpctrain checkpoint`."""
