"""Write the journal and publish its incidents.

If the journal cannot be written, the manager retries every few seconds. Until a retry succeeds, the
supervisor sends no command to the engine.
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
from plimsoll_sidecar.record.journal import MAX_UNPUBLISHED_INCIDENTS, Journal, JournalError
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.storage import LastKnownEngine

log = logging.getLogger(__name__)

WRITE_RETRY_INTERVAL_S = 5.0
# A crash loses what was learned since the last write.
LEARNED_WRITE_INTERVAL_S = 300.0
MAX_SHOWN_INCIDENTS = 20


class JournalManager:
    """Journal in ``state_dir``, and the changes that are not written yet.

    ``is_published_elsewhere`` returns whether another pod publishes an incident.

    Attributes:
        unwritten: The changed incidents that have not been written, by name: all open ones, and the
            last ended ones, as many as the journal would keep.
        hold: The reason why the journal cannot be written; None if it can.
        engine: The last known state of the engine, which the next write includes.
        learned: The learned budgets, which a write includes if :attr:`is_learned_due`.
        recent: The newest incidents in the journal, newest first.

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
        self._retry_at = self._mark_at = 0.0
        self._acknowledged: dict[str, int] = {}
        """Published revisions that the journal does not know yet, by incident."""
        self.unwritten: dict[str, Incident] = {}
        self.hold: str | None = None
        self.engine = LastKnownEngine()
        self.learned = LearnedBudgets()
        self._learned_written_at = time.monotonic()
        self.recent: list[Incident] = []

    @property
    def is_open(self) -> bool:
        """Whether the journal has been opened and read."""
        return self._journal is not None

    @property
    def clock(self) -> ClockReading | None:
        """Clock reading in the journal when it was opened; None without one."""
        return self._journal.clock if self._journal is not None else None

    @property
    def set_aside_names(self) -> list[str]:
        """Names of the damaged parts of the journal in files, oldest first."""
        return self._journal.set_aside_names if self._journal is not None else []

    @property
    def is_due(self) -> bool:
        """Whether a write is allowed now, after the pause that follows a failed write."""
        return self.hold is None or time.monotonic() >= self._retry_at

    @property
    def is_learned_due(self) -> bool:
        """Whether the next write must include the learned budgets."""
        return time.monotonic() - self._learned_written_at >= LEARNED_WRITE_INTERVAL_S

    @property
    def num_unpublished(self) -> int:
        """Number of incidents whose newest state has not been published."""
        return self._publisher.num_unpublished if self._publisher is not None else 0

    def open(self) -> GovernorState:
        """Open the journal, and return the governor's state.

        On failure, set ``hold`` and return an empty state.
        """
        self._retry_at = time.monotonic() + WRITE_RETRY_INTERVAL_S
        try:
            journal = Journal(
                self._path, self._publisher is not None, self._metrics.count_damaged_part
            )
            state, self.engine = journal.load()
            self.learned = journal.learned
            self.recent = journal.read_recent(MAX_SHOWN_INCIDENTS)
        except JournalError as error:
            self._set_hold(str(error))
            return GovernorState()
        self._journal = journal
        self._set_hold(None)
        return state

    def add_changed(self, incident: Incident) -> None:
        """Include a changed incident in the next write."""
        self.unwritten[incident.name] = incident
        if len(self.unwritten) <= MAX_UNPUBLISHED_INCIDENTS:
            return
        # The journal has not been writable for days. The order is that of the first changes.
        oldest_ended = next((one.name for one in self.unwritten.values() if one.ended), None)
        if oldest_ended is not None:
            del self.unwritten[oldest_ended]

    def add_unwritten(self, state: GovernorState, incidents: Iterable[Incident]) -> None:
        """Add incidents from before the journal was read, except kinds that ``state`` has."""
        kinds = {incident.kind for incident in state.incidents}
        added_incidents = [incident for incident in incidents if incident.kind not in kinds]
        state.incidents.extend(added_incidents)
        ended = [incident for incident in self.unwritten.values() if incident.ended]
        self.unwritten = {incident.name: incident for incident in (*ended, *added_incidents)}

    def write(self, state: GovernorState, clock: ClockReading, is_last: bool = False) -> bool:
        """Write the state and the changed incidents, and report whether the write succeeded.

        If ``is_last``, the learned budgets are written even if they are not due.
        """
        if self._journal is None:
            return False
        try:
            learned = self.learned if is_last or self.is_learned_due else None
            unwritten = list(self.unwritten.values())
            self._journal.write(state, unwritten, self.engine, clock, learned)
            if learned is not None:
                self._learned_written_at = time.monotonic()
        except JournalError as error:
            self._retry_at = time.monotonic() + WRITE_RETRY_INTERVAL_S
            self._set_hold(str(error))
            return False
        self.unwritten.clear()
        self._set_hold(None)
        self.publish()
        return True

    def publish(self) -> None:
        """Pass unpublished incidents to the publisher, and update :attr:`recent`."""
        if self._journal is None:
            return
        try:
            self.recent = self._journal.read_recent(MAX_SHOWN_INCIDENTS)
            if self._publisher is not None:
                for revision, incident in self._journal.read_unpublished():
                    if revision <= self._acknowledged.get(incident.name, 0):
                        continue
                    if self._is_published_elsewhere(incident):
                        self._journal.mark_published(incident.name, revision)
                    else:
                        self._publisher.queue_incident(revision, incident)
        except JournalError as error:
            self._set_hold(str(error))

    def mark_published(self) -> None:
        """Mark the incidents in the journal that have been published."""
        if self._publisher is None or self._journal is None:
            return
        self._acknowledged.update(self._publisher.take_acknowledged())
        if not self._acknowledged or time.monotonic() < self._mark_at:
            return
        for name, revision in list(self._acknowledged.items()):
            try:
                self._journal.mark_published(name, revision)
            except JournalError as error:
                # The incident is published again after a restart, which has no effect.
                if not self._mark_at:
                    log.warning(
                        "failed to mark incident %s as published in the journal: %s", name, error
                    )
                self._mark_at = time.monotonic() + WRITE_RETRY_INTERVAL_S
                return
            del self._acknowledged[name]
        self._mark_at = 0.0
        self.publish()  # more incidents, if there were too many to read at once

    def close(self) -> None:
        """Close the journal if it is open."""
        if self._journal is not None:
            self._journal.close()

    def _set_hold(self, reason: str | None) -> None:
        if reason != self.hold:
            if reason is None:
                log.info("the journal is writable again")
            else:
                log.error("%s", reason)
        self.hold = reason
        self._metrics.export_journal_state(reason is None)
