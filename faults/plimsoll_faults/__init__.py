"""Faults and tiny models for tests and demonstrations of the supervisor.

The engine finds this package by its entry points (``faults/pyproject.toml``) and loads it only
where ``PLIMSOLL_INJECT`` is set; product images do not have it.
"""
