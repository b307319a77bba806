"""Benchmarks: `make bench-NAME` runs `python -m benchmarks.NAME`.

Each writes its figures to build/bench/NAME.json and a table, with the command, the machine and the
number of repeats, to docs/results/NAME.md.
"""
