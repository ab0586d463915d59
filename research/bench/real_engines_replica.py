"""One engine with its supervisor in a case, and the rows that the case writes."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.govern.incident import Incident
from tests.conformance.rig import START_S, Rig, until
from tests.conformance.watching import confirmed, served

MISSED_S = 180.0
CLIENTS, TOKENS = 5, 64


@dataclass
class Book:
    """One case's rows, and when it has to end. ``beside`` are the cases that run beside it."""

    path: Path
    beside: tuple[str, ...]
    ends_at: float

    @property
    def ended(self) -> Path:
        """There once the case has ended its engine."""
        return self.path.with_suffix(".ended")

    def alone(self) -> bool:
        """Whether every other case has ended its engine."""
        return all((self.path.parent / f"{name}.ended").exists() for name in self.beside)

    def note(self, case: str, **found: Any) -> None:
        row = {"case": case, "replica": self.path.stem, "at": round(time.time(), 1)}
        row |= {"load_1min": round(os.getloadavg()[0], 1)} | found
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def left_s(self) -> float:
        return self.ends_at - time.time()

    def step(self, what: Callable[[], object]) -> bool:
        """Run a step; one that fails becomes a row, and the next one is tried."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the time on the device goes on
            trace = traceback.format_exc()[-1500:]
            self.note("failed", error=f"{type(error).__name__}: {error}"[-3000:], trace=trace)
            return False
        return True


class Replica:
    """A rig and the row book; ``life`` is the engine's number."""

    def __init__(self, rig: Rig, book: Book) -> None:
        self.rig, self.book = rig, book
        self.life = 0
        self.since = time.monotonic()
        self.caused: set[str] = set()
        self.injected = False

    def ready(self) -> None:
        """Wait for the engine of the next life."""
        begin = time.monotonic()
        until(self.rig.serving, START_S, f"an engine that serves: {self.rig.log('engine')}")
        self.life += 1
        self.injected = False
        self.since = time.monotonic()
        self.excuse()
        status = self.rig.status()
        self.book.note(
            "ready",
            life=self.life,
            seconds=round(time.monotonic() - begin, 1),
            version=status.version,
            processes=[p.role.value for p in status.processes],
            devices=[d.uuid for d in status.devices],
        )

    def age_s(self) -> float:
        """Return the age of the present life in seconds, since it served."""
        return time.monotonic() - self.since

    def excuse(self) -> None:
        """Count what is open now as caused by the case."""
        self.caused |= {one.name for one in self.rig.incidents()} if self.life > 1 else set()

    def healthy(self, seconds: float) -> None:
        """Serve under load for ``seconds``, in which nothing may be confirmed."""
        self.load()
        self.stays_healthy(lambda: served(self.rig, seconds))

    def stays_healthy(self, what: Callable[[], None], since: float | None = None) -> None:
        """Note how long ``what`` took, or the time ``since`` (monotonic), and what was suspected.

        A life that holds what a case leaked is ``injected``: it is not a healthy one.
        """
        begin = time.monotonic() if since is None else since
        before = Counter(self.rig.answers)
        try:
            what()
        finally:
            found = [one for one in self.rig.incidents() if one.name not in self.caused]
            self.book.note(
                "healthy",
                life=self.life,
                seconds=round(time.monotonic() - begin, 1),
                answers=dict(self.rig.answers - before),
                incidents=[told(one) for one in found],
                injected=self.injected,
            )

    def load(self) -> None:
        """Send so many and such long requests that one is always under way."""
        until(self.rig.serving, START_S, "an engine that serves")
        self.rig.load(CLIENTS, TOKENS)

    def seen(self, kind: IncidentKind, since: float) -> Incident | None:
        """Return the incident as soon as it is confirmed; None after :data:`MISSED_S`."""
        deadline = time.monotonic() + MISSED_S
        while time.monotonic() < deadline:
            found = confirmed(self.rig, kind, since)
            if found is not None:
                return found
            time.sleep(0.25)
        return None


def acted(incident: Incident) -> int:
    """Count the steps that were sent to the engine."""
    return sum(
        step.operation_id is not None and step.outcome is not StepOutcome.WOULD
        for step in incident.timeline
    )


def told(incident: Incident) -> dict[str, Any]:
    attribution = incident.attribution
    return {
        "name": incident.name,
        "kind": incident.kind.value,
        "confirmed": incident.confirmed_at is not None,
        "actions": acted(incident),
        "phase": incident.phase.value,
        "waits": incident.waits.value if incident.waits is not None else None,
        "segment": attribution.segment,
        "process": attribution.process,
        "bytes": attribution.bytes,
        "evidence": attribution.evidence[:4],
        "steps": [f"{s.step} {s.outcome.value} {s.message}"[:160] for s in incident.timeline][:12],
    }
