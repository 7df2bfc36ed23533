"""Sources that can be packed: arrays, tables, images, text, iterators."""
