"""Small trainings, each with one fault, for `hpctrain check`."""
