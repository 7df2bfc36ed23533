"""The command line: parses options, calls the package, and sets the exit code."""
