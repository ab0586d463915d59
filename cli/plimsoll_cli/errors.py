"""Errors that end a command; their message is printed without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """Invalid file, field or option; the program exits with status 2.

    The message names the file, field or option, and says what to do.
    """


class RunError(Exception):
    """Failure of a valid command; the program exits with status 1."""
