"""Define the exception for failed injections."""

from __future__ import annotations


class InjectionError(Exception):
    """Raised if a workload cannot be supervised safely; the message names the field."""
