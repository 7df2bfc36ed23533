"""Order of the samples, and which rank reads which samples: pure functions of seed, epoch, position and rank."""
