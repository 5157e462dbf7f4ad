"""Speed and memory as ratios, measured in one run: `python -m benchmarks` (or `make bench`).

The tests never run these. Absolute times do not transfer between machines, but ratios to the GEMM peak and to installed
peers of the same run do.
"""
