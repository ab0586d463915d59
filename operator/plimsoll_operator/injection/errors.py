"""Define the exception for failed injections."""

from __future__ import annotations


class InjectionError(Exception):
    """Raised for a workload that cannot be supervised safely.

    The message names the field and says what to do.
    """
