"""Faults and tiny models for tests and demonstrations of the supervisor.

The engine finds this package through its entry points (``faults/pyproject.toml``) and loads it only
if ``PLIMSOLL_INJECT`` is set. Product images do not contain it.
"""
