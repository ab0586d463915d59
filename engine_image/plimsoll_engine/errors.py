"""Errors that end more than one request.

Any other error during a step fails only the request that caused it (``core/engine_core.py``).
"""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable is invalid."""


class SettingsError(ValueError):
    """A setting is invalid, so every later start would also fail."""


class LoadError(Exception):
    """The checkpoint or adapter is invalid, so every later load would also fail."""


class FatalWorkerError(RuntimeError):
    """The worker cannot continue, but its replacement can."""


class DeviceLostError(FatalWorkerError):
    """The device no longer responds. Only a new process can use it again."""


class RanksLostError(FatalWorkerError):
    """The process group of the ranks has failed, for example because a rank exited."""

    def __init__(self, message: str, has_rank_exited: bool = False) -> None:
        super().__init__(message)
        self.rank_exited = has_rank_exited


class GrammarServerLostError(FatalWorkerError):
    """The process that compiles grammars has exited, and this worker cannot start another one."""


class WarmUpError(FatalWorkerError):
    """The model failed during the warm-up."""
