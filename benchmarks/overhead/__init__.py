"""What the agreement on a stop, the comparison of the ranks and the guards add to a step of 50 ms."""
