"""What the ranks write for each other while no progress is made, and what follows from it."""
