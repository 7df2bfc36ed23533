"""Two example tasks that train on a laptop, on data that needs no download."""
