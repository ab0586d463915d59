"""The two ways in which a command ends badly. Both are printed as they are, without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """A file, field or option that cannot be used: exit status 2.

    The message names it and says what to do.
    """


class RunError(Exception):
    """What was asked for was understood and did not succeed: exit status 1."""
