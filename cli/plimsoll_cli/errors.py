"""Errors that end a command. Their message is printed without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """A file, field or option is invalid; the exit status is 2.

    The message names it and says what to do.
    """


class RunError(Exception):
    """A valid command failed; the exit status is 1."""
