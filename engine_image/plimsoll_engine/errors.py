"""Errors that end more than one request. Each class says which process must be replaced.

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
    """The device no longer answers. A CUDA fault is sticky, so only a new process helps."""


class RanksLostError(FatalWorkerError):
    """The process group of the ranks has failed. Only a new worker can form another one.

    ``gone`` means that a rank has exited. Its parent process reports why.
    """

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class GrammarServerLostError(FatalWorkerError):
    """The server that compiles new grammars has exited. Only a new worker starts another one."""


class WarmUpError(FatalWorkerError):
    """The model failed in the warm-up. The message contains that of the model's error."""
