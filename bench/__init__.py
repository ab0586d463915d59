"""Benchmarks: ``python -m bench.NAME`` writes ``bench/results/NAME.json``."""
