"""What can be packed: arrays, tables, images, text, iterators, behind one `Rows` protocol."""
