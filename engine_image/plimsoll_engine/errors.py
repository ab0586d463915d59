"""Errors that end more than one request: each class says what it ends.

Of everything else that is raised while a step is computed, the request dies that caused it
(``core/engine_core.py``). What the end of a worker means for the engine is decided in
``frontend/workers/failures.py``.
"""

from __future__ import annotations


class UsageError(Exception):
    """A flag, path or variable that cannot be used; the message names it and says what to do."""


class SettingsError(ValueError):
    """A size that cannot be; the message names the flag. Every further start meets it as well."""


class LoadError(Exception):
    """The checkpoint cannot be served; the message names the file, tensor or field.

    Every further start meets it as well.
    """


class WorkerEnds(RuntimeError):
    """Nothing more can be computed by this worker; another one can go on."""


class DeviceLost(WorkerEnds):
    """The device no longer answers (a CUDA fault is sticky): only a new process helps."""


class RanksLost(WorkerEnds):
    """The ranks no longer compute together: only a new group helps.

    ``gone`` says that a rank has ended; the process that started it reports the cause.
    """

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class TrialsLost(WorkerEnds):
    """The server that tries grammars out is gone; only another worker has one again."""


class WarmUpError(WorkerEnds):
    """The model cannot compute a throw-away request; the message is the model's."""
