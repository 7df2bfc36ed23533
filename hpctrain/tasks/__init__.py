"""Two tasks that come with hpctrain: both train on a laptop, on data that is on every machine."""
