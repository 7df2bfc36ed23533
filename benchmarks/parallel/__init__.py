"""Split models: equal to one rank, their memory, traffic and time against formulas and peers, and their checkpoints;
Horovod scripts on hpctrain against Horovod."""
