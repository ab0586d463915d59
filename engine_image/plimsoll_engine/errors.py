"""Errors that end more than one request. Each class says which process must be replaced.

Any other error during a step fails only the request that caused it (``core/engine_core.py``).
``frontend/workers/failures.py`` decides what to restart after a worker has ended.
"""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable is invalid. The message names it and says what to do."""


class SettingsError(ValueError):
    """A size is invalid, and would be at every later start. The message names the flag."""


class LoadError(Exception):
    """The checkpoint or adapter cannot be loaded, now or later.

    The message names the file, tensor or field.
    """


class WorkerEnds(RuntimeError):
    """The worker cannot continue; its replacement can."""


class DeviceLost(WorkerEnds):
    """The device no longer answers. A CUDA fault is sticky, so only a new process helps."""


class RanksLost(WorkerEnds):
    """The process group of the ranks has failed and must be formed again by a new worker.

    ``gone`` means that a rank has exited. The process that started the rank reports why.
    """

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class TrialsLost(WorkerEnds):
    """The server that compiles new grammars has exited. Only a new worker starts another one."""


class WarmUpError(WorkerEnds):
    """The warm-up request failed in the model. The message is that of the model's error."""
