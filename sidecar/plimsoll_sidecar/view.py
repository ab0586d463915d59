"""Update ``/state``, the metrics, and the history for the supervisor's page after each sample."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from plimsoll_api.admin import Status
from plimsoll_api.assessment import Assessment
from plimsoll_api.incident_story import make_record_story
from plimsoll_api.state import Signal, View
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.govern.command import EngineView, Event, EventType
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.history import History
from plimsoll_sidecar.record.journal_manager import JournalManager
from plimsoll_sidecar.record.metrics import Metrics

log = logging.getLogger(__name__)


class Observation(NamedTuple):
    """State of the replica in one sample.

    Attributes:
        now: The time of the sample in Unix seconds.
        assessment: The detector's assessment of the sample.
        engine: The state of the engine.
        status: The status that the engine reported; None if it did not answer.
        out_of_service: The reasons why the pod is not ready, each with its remaining seconds.
        signals: The signals of the sample by name.

    """

    now: float
    assessment: Assessment
    engine: EngineView
    status: Status | None
    out_of_service: dict[str, float]
    signals: dict[str, Signal]


class Display:
    """State of the supervisor, for the threads that serve it to clients.

    ``state`` is the JSON text of a :class:`View`, which each update replaces.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.state = b"{}"
        self.history = History()

    def update(
        self, observation: Observation, events: list[Event], config: ConfigFile, governor: Governor,
        journal: JournalManager,
    ) -> None:  # fmt: skip
        """Update the state and the metrics. Call this after the journal has stored the turn."""
        left, standing = governor.count_restarts_left(observation.now), governor.state
        self._metrics.count_events(events)
        self._metrics.export_status(
            len(standing.incidents), left, journal.num_unpublished, standing.exhausted
        )
        self.history.add(observation.now, observation.assessment)
        current, engine = config.current, observation.engine
        view = View(
            time=observation.now,
            service=current.service.name,
            mode=current.supervision.mode.value,
            engine_state=engine.state.value if engine.state else None,
            epoch=engine.epoch,
            assessment=observation.assessment,
            budgets=msgspec.Raw(msgspec.json.encode(governor.memory)),
            open=standing.incidents,
            recent=journal.recent,
            restarts_left=left,
            restart_budget_exhausted=standing.exhausted,
            journal_error=journal.hold,
            set_aside=journal.set_aside_names,
            config_error=config.error,
            ladder=list(current.supervision.ladder),
            ledger=observation.status.ledger if observation.status is not None else [],
            out_of_service={
                reason: observation.now + s for reason, s in observation.out_of_service.items()
            },
            signals=observation.signals,
            role=current.service.role,
        )
        self.state = msgspec.json.encode(view)


def log_event(event: Event) -> None:
    """Log the change of an incident, as a warning unless the type is ``Advanced``."""
    if event.type is EventType.ADVANCED:
        incident = event.incident
        progress = [incident.phase.value, *([incident.message] if incident.message else [])]
        log.info("incident %s: %s", incident.name, ": ".join(progress))
        return
    change = event.action or event.type
    log.warning(
        "incident %s: %s: %s",
        event.incident.name,
        change,
        make_record_story(event.incident).sentence,
    )
