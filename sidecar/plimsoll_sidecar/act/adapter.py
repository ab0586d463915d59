"""The verbs that every kind of engine is spoken to with.

What an engine cannot do is absent from the capabilities of its status, and the ladder skips it.
"""

from __future__ import annotations

from typing import Protocol

from plimsoll_api.admin import Diagnostic, Status
from plimsoll_sidecar.govern.command import Command, Result


class EngineError(Exception):
    """The engine did not answer, or not in a way that can be used; the message says which."""


class EngineAdapter(Protocol):
    """Every call is bounded in time. The verbs return a :class:`Result` and never raise.

    ``Refused`` means that nothing was begun. The same ``operation_id`` may be sent again.
    """

    def status(self) -> Status:
        """The engine's account of itself; :class:`EngineError` where there is none."""

    def serves(self) -> bool:
        """Whether the serving port answers at all, whatever it says: the second witness of a
        frontend that gives no status."""

    def trim(self, command: Command) -> Result: ...

    def drain(self, command: Command) -> Result: ...

    def resume(self, epoch: str) -> None:
        """Ends a drain that led to nothing; :class:`EngineError` where it cannot."""

    def restart_worker(self, command: Command) -> Result: ...

    def restart_engine(self, command: Command) -> Result: ...

    def diagnostics(self, kind: Diagnostic) -> bytes:
        """The text of one diagnostic; :class:`EngineError` where there is none."""
