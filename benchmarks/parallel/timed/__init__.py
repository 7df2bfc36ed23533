"""Steps of hpctrain's layouts and of the peers, as programs of their own that take turns."""
