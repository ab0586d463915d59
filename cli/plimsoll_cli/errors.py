"""Errors that end a command. Their message is printed without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """Invalid file, field or option; the exit status is 2.

    The message names it and says what to do.
    """


class RunError(Exception):
    """A valid command failed; the exit status is 1."""
