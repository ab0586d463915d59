"""Errors that end more than one request, by the process that must be replaced.

Any other error during a step fails only the request that caused it (``core/engine_core.py``).
``frontend/workers/failures.py`` decides what to restart after a worker has ended.
"""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable is invalid. The message names the value and says what to do."""


class SettingsError(ValueError):
    """A setting is invalid, so every later start would also fail. The message names the flag."""


class LoadError(Exception):
    """The checkpoint or adapter is invalid, so every later load would also fail.

    The message names the file, tensor or field.
    """


class FatalWorkerError(RuntimeError):
    """The worker cannot continue, but its replacement can."""


class DeviceLostError(FatalWorkerError):
    """The device no longer responds.

    A CUDA error persists for the life of the process, so only a new worker can use the device.
    """


class RanksLostError(FatalWorkerError):
    """The process group of the ranks has failed. Only a new worker can form another one.

    ``rank_exited`` is True if a rank exited. The rank's parent process then logs the reason.
    """

    def __init__(self, message: str, has_rank_exited: bool = False) -> None:
        super().__init__(message)
        self.rank_exited = has_rank_exited


class GrammarServerLostError(FatalWorkerError):
    """The server that compiles grammars has exited. Only a new worker can start another one."""


class WarmUpError(FatalWorkerError):
    """The model failed during the warm-up. The message includes the model's own error message."""
