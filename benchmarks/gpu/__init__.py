"""What hpctrain does on a GPU, each part compared with what it does on the CPU: `make check-gpu`."""
