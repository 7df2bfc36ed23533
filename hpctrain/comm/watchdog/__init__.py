"""A deadline around any communicator: watcher, status board, host probe, who is missing, orderly end."""
