"""Define the exception for failed injections."""

from __future__ import annotations


class InjectionError(Exception):
    """Raised if a workload cannot be supervised safely.

    The message names the field and says what to do.
    """
