"""Checks of hpctrain on a GPU: results of each part compared with those on the CPU. `make check-gpu`."""
