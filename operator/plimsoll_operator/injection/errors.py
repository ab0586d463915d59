"""Define the error of an injection."""

from __future__ import annotations


class InjectionError(Exception):
    """Error for a workload that cannot be supervised safely.

    The message names the field and says what to do.
    """
