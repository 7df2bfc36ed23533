"""The start of a rank, before any communicator with a deadline exists."""
