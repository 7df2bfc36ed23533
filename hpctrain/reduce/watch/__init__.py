"""What an updater does around its steps: restores buffers after a dropped step, and compares the ranks."""
