"""One save as a transaction in phases, and the saver that runs it at once or in the background."""
