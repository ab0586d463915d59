"""What is said of a pod that cannot be injected."""

from __future__ import annotations


class InjectionError(Exception):
    """A workload that cannot be supervised safely.

    The message names its field and says what to do.
    """
