"""Two example tasks. Both train on a laptop, on data that needs no download."""
