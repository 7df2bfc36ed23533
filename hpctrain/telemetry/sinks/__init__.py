"""What receives a run's records besides its own files."""
