"""Parameters sharded by FSDP2, and its communication while a CPU computes."""
