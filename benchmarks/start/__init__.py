"""Starting ranks, without and with a fork server: time, processor time, path operations, memory, results."""
