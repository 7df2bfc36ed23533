#!/bin/bash
srun --wait=25 python oom_tmp.py mpi
echo "srun rc $?"
