"""Operations on finished checkpoints, as used by the commands: verify, compare, copy, export, import, prune."""
