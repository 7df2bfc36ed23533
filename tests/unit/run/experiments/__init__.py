"""Unit tests of the experiments of `hpctrain check`."""
