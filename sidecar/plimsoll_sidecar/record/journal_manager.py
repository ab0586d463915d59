"""Write the journal and publish its incidents.

If the journal cannot be opened or written, the manager tries again every few seconds. Until it
succeeds, nothing is sent to the engine, for the reason in :attr:`JournalManager.hold`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_sidecar.clock import ClockReading
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal, JournalError
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.storage import LastKnownEngine

log = logging.getLogger(__name__)

RETRY_S = 5.0
LEARNED_WRITE_PERIOD_S = 300.0
"""Seconds between two writes of what has been learned about budgets.

A crash loses at most what was learned in this time.
"""
SHOWN_INCIDENTS = 20
"""Maximum number of past incidents on the page."""


class JournalManager:
    """Journal in ``state_dir``, with the incidents that have not been written yet.

    ``is_published_elsewhere`` returns whether another pod publishes an incident: the leader of a
    group publishes those of all its pods.
    """

    def __init__(
        self,
        state_dir: Path,
        publisher: Publisher | None,
        metrics: Metrics,
        is_published_elsewhere: Callable[[Incident], bool],
    ) -> None:
        self._path, self._publisher, self._metrics = state_dir / JOURNAL_FILE, publisher, metrics
        self._is_published_elsewhere = is_published_elsewhere
        self._journal: Journal | None = None
        self._retry_at = 0.0
        self.unwritten: dict[str, Incident] = {}
        self.hold: str | None = None
        self.engine = LastKnownEngine()
        """State of the engine, to be written together with the governor's next state."""
        self.learned = LearnedBudgets()
        """Learned budgets, to be written when :attr:`is_learned_due`."""
        self._learned_at = time.monotonic()
        self.recent: list[Incident] = []

    @property
    def is_open(self) -> bool:
        """Whether the journal has been read."""
        return self._journal is not None

    @property
    def clock(self) -> ClockReading | None:
        """The last clock reading in the journal; None if there is none."""
        return self._journal.clock if self._journal is not None else None

    @property
    def set_aside(self) -> list[str]:
        """Names of the damaged parts of the journal."""
        return self._journal.set_aside_names if self._journal is not None else []

    @property
    def is_due(self) -> bool:
        """Whether a write is due: the last one succeeded, or :data:`RETRY_S` have passed."""
        return self.hold is None or time.monotonic() >= self._retry_at

    @property
    def is_learned_due(self) -> bool:
        """Whether the learned budgets must be written again."""
        return time.monotonic() - self._learned_at >= LEARNED_WRITE_PERIOD_S

    @property
    def backlog(self) -> int:
        """Number of incidents whose newest state has not been published."""
        return self._publisher.backlog if self._publisher is not None else 0

    def open(self) -> GovernorState:
        """Open and read the journal. On failure, return an empty state and set ``hold``."""
        self._retry_at = time.monotonic() + RETRY_S
        try:
            journal = Journal(
                self._path, self._publisher is not None, self._metrics.count_damaged_part
            )
            state, self.engine = journal.load()
            self.learned = journal.learned
            self.recent = journal.recent(SHOWN_INCIDENTS)
        except JournalError as error:
            self._set_hold(str(error))
            return GovernorState()
        self._journal = journal
        self._set_hold(None)
        return state

    def add_unwritten(self, state: GovernorState, incidents: Iterable[Incident]) -> None:
        """Add the incidents that opened before the journal was read to its ``state``."""
        kinds = {incident.kind for incident in state.incidents}
        newer = [incident for incident in incidents if incident.kind not in kinds]
        state.incidents.extend(newer)
        ended = [incident for incident in self.unwritten.values() if incident.ended]
        self.unwritten = {incident.name: incident for incident in (*ended, *newer)}

    def write(self, state: GovernorState, clock: ClockReading, last: bool = False) -> bool:
        """Write the state and the changed incidents, and return whether that succeeded.

        The ``last`` write of the process includes the learned budgets.
        """
        if self._journal is None:
            return False
        try:
            learned = self.learned if last or self.is_learned_due else None
            unwritten = list(self.unwritten.values())
            self._journal.write(state, unwritten, self.engine, clock, learned)
            if learned is not None:
                self._learned_at = time.monotonic()
        except JournalError as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._set_hold(str(error))
            return False
        self.unwritten.clear()
        self._set_hold(None)
        self.publish()
        return True

    def publish(self) -> None:
        """Pass all unpublished incidents to the publisher."""
        if self._journal is None:
            return
        try:
            self.recent = self._journal.recent(SHOWN_INCIDENTS)
            if self._publisher is not None:
                for revision, incident in self._journal.read_unpublished():
                    if self._is_published_elsewhere(incident):
                        self._journal.mark_published(incident.name, revision)
                    else:
                        self._publisher.offer(revision, incident)
        except JournalError as error:
            self._set_hold(str(error))

    def mark_acknowledged(self) -> None:
        """Record in the journal which incidents have been published."""
        if self._publisher is None or self._journal is None:
            return
        arrived = self._publisher.take_acknowledged()
        for name, revision in arrived:
            try:
                self._journal.mark_published(name, revision)
            except JournalError as error:
                log.warning(
                    "%s", error
                )  # after a restart, it is published again, which is harmless
        if arrived:
            self.publish()  # incidents that exceeded the limit so far

    def close(self) -> None:
        """Close the journal at the end of the process."""
        if self._journal is not None:
            self._journal.close()

    def _set_hold(self, reason: str | None) -> None:
        if reason != self.hold:
            if reason is None:
                log.info("the journal is writable again")
            else:
                log.error("%s", reason)
        self.hold = reason
        self._metrics.show_journal(reason is None)
