"""An incident's phases as a table.

Tests ``govern/incident.py`` and ``govern/phases.py``.
"""

from __future__ import annotations

import pytest

from plimsoll_api.incidents import ENDED_PHASES, IncidentKind, IncidentPhase
from plimsoll_sidecar.govern.incident import (
    NEXT_PHASES,
    ROUND_DURATION_S,
    Incident,
    PhaseChangeError,
    compute_covered_s,
    move_to_phase,
)
from plimsoll_sidecar.govern.phases import PHASE_HANDLERS


def incident(phase: IncidentPhase) -> Incident:
    return Incident(
        name="pod-1", kind=IncidentKind.HOST_GROWTH, epoch="a:1", opened_at=1.0, phase=phase
    )


def test_every_phase_has_a_function_and_a_row() -> None:
    assert set(PHASE_HANDLERS) == set(NEXT_PHASES) == set(IncidentPhase)


def test_every_phase_but_the_ended_ones_leads_to_an_end() -> None:
    for phase in IncidentPhase:
        reached, waiting = {phase}, [phase]
        while waiting:
            waiting += (new := NEXT_PHASES[waiting.pop()] - reached)
            reached |= new
        assert reached & set(ENDED_PHASES)
        assert phase not in ENDED_PHASES or not NEXT_PHASES[phase]


@pytest.mark.parametrize("phase", IncidentPhase)
def test_a_phase_that_cannot_follow_is_refused_and_changes_nothing(phase: IncidentPhase) -> None:
    for other in set(IncidentPhase) - NEXT_PHASES[phase] - {phase}:
        one = incident(phase)
        with pytest.raises(
            PhaseChangeError, match=f"must not move from phase {phase} to phase {other}"
        ):
            move_to_phase(one, other, 5.0)
        assert (one.phase, one.phase_since) == (phase, 0.0)


def test_the_same_phase_again_keeps_its_begin() -> None:
    one = incident(IncidentPhase.TRIMMING)
    move_to_phase(one, IncidentPhase.TRIMMING, 5.0)
    assert one.phase_since == 0.0
    move_to_phase(one, IncidentPhase.CONFIRMED, 6.0)
    assert (one.phase, one.phase_since) == (IncidentPhase.CONFIRMED, 6.0)


@pytest.mark.parametrize(
    ("interval_s", "assessments"), [(0.25, 5), (1.0, 5), (2.0, 3), (5.0, 2), (30.0, 2)]
)
def test_a_round_takes_seconds_and_two_assessments_at_least(
    interval_s: float, assessments: int
) -> None:
    counted, count = 0.0, 0
    while counted < ROUND_DURATION_S:
        counted, count = counted + compute_covered_s(interval_s), count + 1
    assert count == assessments
