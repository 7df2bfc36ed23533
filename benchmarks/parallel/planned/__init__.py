"""What `hpctrain plan` says that a rank needs, against what runs of `hpctrain train` had."""
