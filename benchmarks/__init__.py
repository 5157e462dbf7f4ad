"""Speed and memory as ratios, measured in one run: `python -m benchmarks` (or `make bench`).

Never part of the tests. Absolute times do not carry over between machines; ratios to the same run's GEMM peak, and to
the peers that are installed, do.
"""
