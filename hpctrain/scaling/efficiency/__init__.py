"""Attribution of each step's time on every rank, and the POP efficiency hierarchy."""
