"""Predictions of `hpctrain.scaling` against measured steps on a cluster of four nodes."""
