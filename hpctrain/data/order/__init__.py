"""Which sample comes when, and which rank reads it: pure functions of seed, epoch, position and rank."""
