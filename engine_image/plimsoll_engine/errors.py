"""Errors that end more than one request. Each class says what it ends.

Any other error during a step fails only the request that caused it (``core/engine_core.py``).
``frontend/workers/failures.py`` decides what the end of a worker means for the engine.
"""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable is invalid. The message names it and says what to do."""


class SettingsError(ValueError):
    """A size is invalid, now and at every later start. The message names the flag."""


class LoadError(Exception):
    """The checkpoint cannot be served, now or at any later start.

    The message names the file, tensor or field.
    """


class WorkerEnds(RuntimeError):
    """The worker cannot continue, but another worker can."""


class DeviceLost(WorkerEnds):
    """The device no longer answers. A CUDA fault is sticky, so only a new process helps."""


class RanksLost(WorkerEnds):
    """The process group of the ranks failed, so only a new group helps.

    ``gone`` means that a rank has exited. The process that started the rank reports the cause.
    """

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class TrialsLost(WorkerEnds):
    """The server that compiles new grammars is gone. Only a new worker has another one."""


class WarmUpError(WorkerEnds):
    """The model failed on the warm-up request. The message is that of the model's error."""
