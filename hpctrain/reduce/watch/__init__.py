"""What an updater does around its steps: buffers are put back after a dropped step, and the ranks are compared."""
