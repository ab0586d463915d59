"""Keeps the journal written and its incidents published. While it cannot, nothing may be done.

A journal that cannot be opened or written is tried again every few seconds. Until then
:attr:`Keeper.hold` says why nothing is sent to the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_sidecar.clock import Reading
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal, JournalError
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.storage import LastKnownEngine

log = logging.getLogger(__name__)

RETRY_S = 5.0
SHOWN_INCIDENTS = 20


class Keeper:
    """The journal in ``state_dir``, and the incidents that it does not hold yet.

    ``elsewhere`` says whether another pod publishes an incident: a group's leader does for all.
    """

    def __init__(
        self,
        state_dir: Path,
        publisher: Publisher | None,
        metrics: Metrics,
        elsewhere: Callable[[Incident], bool],
    ) -> None:
        self._path, self._publisher, self._metrics = state_dir / JOURNAL_FILE, publisher, metrics
        self._elsewhere = elsewhere
        self._journal: Journal | None = None
        self._retry_at = 0.0
        self.unwritten: dict[str, Incident] = {}
        self.hold: str | None = None
        self.engine = LastKnownEngine()
        """What is written of the engine with the next state."""
        self.recent: list[Incident] = []

    @property
    def is_open(self) -> bool:
        """Whether the journal has been read."""
        return self._journal is not None

    @property
    def clock(self) -> Reading | None:
        """The clock as it was last written; None if there is no such reading."""
        return self._journal.clock if self._journal is not None else None

    @property
    def set_aside(self) -> list[str]:
        """Parts of the journal that could not be read."""
        return self._journal.kept if self._journal is not None else []

    @property
    def retries(self) -> bool:
        """Whether it is time to write, or to try again what failed."""
        return self.hold is None or time.monotonic() >= self._retry_at

    @property
    def backlog(self) -> int:
        """Incidents that Kubernetes does not have in their newest state."""
        return self._publisher.backlog if self._publisher is not None else 0

    def open(self) -> GovernorState:
        """Open and read the journal; an empty state, and a reason to hold, if that fails."""
        self._retry_at = time.monotonic() + RETRY_S
        try:
            journal = Journal(
                self._path, self._publisher is not None, self._metrics.journal_damaged
            )
            state, self.engine = journal.load()
            self.recent = journal.recent(SHOWN_INCIDENTS)
        except JournalError as error:
            self._set_hold(str(error))
            return GovernorState()
        self._journal = journal
        self._set_hold(None)
        return state

    def join(self, state: GovernorState, seen: Iterable[Incident]) -> None:
        """Add to a journal's ``state`` what was ``seen`` before it could be opened."""
        kinds = {incident.kind for incident in state.incidents}
        newer = [incident for incident in seen if incident.kind not in kinds]
        state.incidents.extend(newer)
        ended = [incident for incident in self.unwritten.values() if incident.ended]
        self.unwritten = {incident.name: incident for incident in (*ended, *newer)}

    def write(self, state: GovernorState, clock: Reading) -> bool:
        """Write the state and the incidents that changed; False if that fails."""
        if self._journal is None:
            return False
        try:
            self._journal.write(state, list(self.unwritten.values()), self.engine, clock)
        except JournalError as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._set_hold(str(error))
            return False
        self.unwritten.clear()
        self._set_hold(None)
        self.publish()
        return True

    def publish(self) -> None:
        """Hand what Kubernetes does not have yet to the publisher."""
        if self._journal is None:
            return
        try:
            self.recent = self._journal.recent(SHOWN_INCIDENTS)
            if self._publisher is not None:
                for revision, incident in self._journal.unpublished():
                    if self._elsewhere(incident):
                        self._journal.published(incident.name, revision)
                    else:
                        self._publisher.offer(revision, incident)
        except JournalError as error:
            self._set_hold(str(error))

    def acknowledge(self) -> None:
        """Note in the journal what has arrived in Kubernetes."""
        if self._publisher is None or self._journal is None:
            return
        arrived = self._publisher.acknowledged()
        for name, revision in arrived:
            try:
                self._journal.published(name, revision)
            except JournalError as error:
                log.warning("%s", error)  # it is published once more after a restart: harmless
        if arrived:
            self.publish()  # incidents for which there was no room so far

    def close(self) -> None:
        """Close the file; for the end of the process."""
        if self._journal is not None:
            self._journal.close()

    def _set_hold(self, reason: str | None) -> None:
        if reason != self.hold:
            if reason is None:
                log.info("the journal is writable again")
            else:
                log.error("%s", reason)
        self.hold = reason
        self._metrics.journal(reason is None)
