"""Recordings of real engines: many at once on one machine, each with what was injected into it.

``python -m leaklab.recording`` makes them, and ``research/leaklab/recordings`` holds those that are
published.
"""
