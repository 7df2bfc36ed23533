"""`hpctrain bench export`: writes measurements for Extra-P, and files with which ReFrame and JUBE run the benchmark."""
