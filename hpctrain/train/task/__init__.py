"""The user's task on one rank: computation of batches, loss weights, learning rate, batch normalisation."""
