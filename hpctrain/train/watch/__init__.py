"""What follows the steps of a run on all ranks: slow ranks, where their time goes, traces."""
