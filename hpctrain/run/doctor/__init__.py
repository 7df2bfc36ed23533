"""What `hpctrain doctor` examines on a rank, and what it says about the facts of all ranks."""
