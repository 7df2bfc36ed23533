"""Operations on finished checkpoints, as used by the commands: verify, diff, copy, export, import, prune."""
