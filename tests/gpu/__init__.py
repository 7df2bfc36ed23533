"""What works differently on a GPU, compared with the CPU. Each test runs on the CPU, and with the mark `gpu` on a GPU.

`python -m tests.gpu` (`make check-gpu`) runs them on a GPU and keeps the results.
"""
