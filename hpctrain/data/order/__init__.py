"""Order of the samples, and which rank reads which: pure functions of seed, epoch, position and rank."""
