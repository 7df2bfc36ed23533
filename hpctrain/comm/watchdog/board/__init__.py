"""The files that ranks write for each other while no progress is made, and the conclusions from them."""
