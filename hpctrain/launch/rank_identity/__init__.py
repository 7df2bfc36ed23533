"""Who this rank is: the table of launchers, and what a container hides of them."""
