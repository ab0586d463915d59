"""Errors of the settings and of the checkpoint: every further start meets them as well."""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable that cannot be used; the message names it and says what to do."""


class SettingsError(ValueError):
    """A size that cannot be; the message names the flag."""


class LoadError(Exception):
    """The checkpoint cannot be served; the message names the file, tensor or field."""
