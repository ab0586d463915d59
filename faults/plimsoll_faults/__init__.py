"""Faults and tiny models for tests and demonstrations of the supervisor.

The engine loads this package only if ``PLIMSOLL_INJECT`` is set. Product images do not contain it.
"""
