"""What happens around an updater's steps: buffers are restored after a dropped step, and the ranks are compared."""
