"""Order of the samples, and the ranks that read them: pure functions of seed, epoch, position and rank."""
