"""The command line: parses options, calls the package, sets the exit code."""
