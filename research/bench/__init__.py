"""Benchmarks: ``python -m bench.NAME`` writes ``research/bench/results/NAME.json``."""
