"""Convert a supervisor's incident record to a LeakIncident object."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.incident_record import IncidentRecord, StepRecord
from plimsoll_api.incidents import ENDED_PHASES, IncidentPhase
from plimsoll_api.leakincident import (
    MAX_INCIDENT_TEXT_CHARS,
    MAX_INCIDENTS_PER_POD,
    MAX_STATUS_STEPS,
    MAX_TEXTS_PER_LIST,
    MAX_TOTAL_TEXT_CHARS,
    IncidentAttribution,
    IncidentCondition,
    IncidentStep,
    IncidentTarget,
    IncidentTrigger,
    IncidentWorkload,
    LeakIncidentSpec,
    LeakIncidentStatus,
    PolicyReference,
)
from plimsoll_api.names import (
    API_GROUP,
    API_VERSION,
    INCIDENT_KIND,
    INCIDENT_PLURAL,
    POLICY_KIND,
    POLICY_LABEL,
    SERVICE_KIND,
    SERVICE_LABEL,
)
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import format_rfc3339

Object = dict[str, Any]

POD_PREFIX_CHARS = 250
"""Maximum length of a pod's name in an incident's name, which may have at most 253 characters."""


def list_object_names(incident: IncidentRecord, pod: str) -> list[str]:
    """Return the possible names of the incident's LeakIncident, preferred name first.

    A small set of names for each pod limits the number of objects.
    """
    first = int(hashlib.sha256(incident.name.encode()).hexdigest()[:8], 16)
    return [
        f"{pod[:POD_PREFIX_CHARS]}-{(first + n) % MAX_INCIDENTS_PER_POD}"
        for n in range(MAX_INCIDENTS_PER_POD)
    ]


def make_spec(
    incident: IncidentRecord, service: ServiceRef, pod: str, container: str
) -> LeakIncidentSpec:
    """Return the spec of a LeakIncident from the incident."""
    group = service.group
    return LeakIncidentSpec(
        id=incident.name,
        workload_ref=_make_workload(service, pod),
        pod=pod,
        container=container,
        epoch=incident.epoch,
        opened_at=format_rfc3339(incident.opened_at),
        kind=incident.kind,
        policy_ref=PolicyReference(service.name) if service.kind == POLICY_KIND else None,
        pod_group=group.key if group else None,
        target=IncidentTarget(service.role) if service.role else None,
    )


def _make_workload(service: ServiceRef, pod: str) -> IncidentWorkload:
    if service.kind != POLICY_KIND:
        return IncidentWorkload(SERVICE_KIND, service.name, API_GROUP)
    owner = service.workload
    if owner is None:
        return IncidentWorkload("Pod", pod)
    return IncidentWorkload(owner.kind, owner.name, owner.api_group)


def make_conditions(
    phase: str, outcome: str | None, opened_at: str, ended_at: str | None, generation: int = 1
) -> list[IncidentCondition]:
    """Return the conditions ``Reconciling`` and ``Resolved``, which change when it ends."""
    ended, resolved = phase in ENDED_PHASES, phase == IncidentPhase.RESOLVED
    end, reason = ended_at or opened_at, (outcome or phase) if ended else phase
    return [
        IncidentCondition(
            type_,
            "True" if true else "False",
            reason,
            end if changed else opened_at,
            "",
            generation,
        )
        for type_, true, changed in (
            ("Reconciling", not ended, ended),
            ("Resolved", resolved, resolved),
        )
    ]


def make_status(
    incident: IncidentRecord, revision: int | None = None, generation: int = 1
) -> LeakIncidentStatus:
    """Return the status of the incident's object, truncated to the limits of the CRD.

    ``revision`` counts the writes of the status.
    """
    attribution, texts = incident.attribution, _TextBudget()
    ended_at = format_rfc3339(incident.ended_at) if incident.ended_at else None
    outcome = incident.reason.value if incident.reason else None
    # The most important texts come first: if there is too much text, the last ones are truncated.
    message = texts.truncate(incident.message)
    evidence = [texts.truncate(text) for text in attribution.evidence[:MAX_TEXTS_PER_LIST]]
    diagnostics = [texts.truncate(path) for path in incident.diagnostics[:MAX_TEXTS_PER_LIST]]
    timeline = [_make_step(step, texts) for step in reversed(incident.timeline[-MAX_STATUS_STEPS:])]
    return LeakIncidentStatus(
        observed_generation=generation,
        conditions=make_conditions(
            incident.phase, outcome, format_rfc3339(incident.opened_at), ended_at, generation
        ),
        revision=revision,
        phase=incident.phase,
        attribution=IncidentAttribution(
            segment=attribution.segment,
            process=attribution.process,
            pod=attribution.pod,
            bytes=attribution.bytes,
            bytes_per_hour=_round_or_none(attribution.bytes_per_s, 3600),
            bytes_per_request=_round_or_none(attribution.bytes_per_request),
            trigger=_make_trigger(attribution.trigger),
            confidence_percent=_to_percent(attribution.confidence),
            evidence=[text for text in evidence if text],
        ),
        timeline=timeline[::-1],
        waiting_reason=incident.waits.value if incident.waits else None,
        outcome=outcome,
        message=message or None,
        returned_bytes=incident.returned_bytes,
        consumed_percent=round(100 * incident.consumed_ratio),
        diagnostics=[path for path in diagnostics if path],
        confirmed_at=format_rfc3339(incident.confirmed_at) if incident.confirmed_at else None,
        ended_at=ended_at,
    )


def make_path(namespace: str, name: str, subresource: str = "") -> str:
    """Return the URL path of a LeakIncident or of its subresource.

    Without ``name``, it is the path of the list.
    """
    parts = ["/apis", API_VERSION, "namespaces", namespace, INCIDENT_PLURAL, name, subresource]
    return "/".join(filter(None, parts))


def make_object(
    incident: IncidentRecord, name: str, service: ServiceRef, pod: str, container: str
) -> Object:
    """Return a LeakIncident object to create, without a status."""
    return _make_object_base(name, service) | {
        "spec": msgspec.to_builtins(make_spec(incident, service, pod, container)),
    }


def make_status_object(
    incident: IncidentRecord, name: str, service: ServiceRef, revision: int, generation: int = 1
) -> Object:
    """Return a LeakIncident object with only a status, to apply to the status subresource."""
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {"name": name, "namespace": service.namespace},
        "status": msgspec.to_builtins(make_status(incident, revision, generation)),
    }
    return body


def _make_object_base(name: str, service: ServiceRef) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            # Set no owner reference: an incident outlives its policy until the operator deletes it.
            "labels": _make_labels(service),
        },
    }


def _make_labels(service: ServiceRef) -> dict[str, str]:
    shown = service.workload.name if service.workload else service.name
    labels = {SERVICE_LABEL: shown[:63].rstrip("-.")}
    return labels | ({POLICY_LABEL: service.name} if service.kind == POLICY_KIND else {})


# Limits each text of a status, and all texts together.
class _TextBudget:
    def __init__(self) -> None:
        self._left = MAX_TOTAL_TEXT_CHARS

    # An ellipsis marks the cut.
    def truncate(self, text: str) -> str:
        room = min(MAX_INCIDENT_TEXT_CHARS, self._left)
        kept = text if len(text) <= room else f"{text[: room - 1]}…" if room else ""
        self._left -= len(kept)
        return kept


def _make_step(step: StepRecord, texts: _TextBudget) -> IncidentStep:
    return IncidentStep(
        time=format_rfc3339(step.time),
        step=step.step[:63],
        outcome=step.outcome.value,
        before_bytes=step.before_bytes,
        after_bytes=step.after_bytes,
        message=texts.truncate(step.message) or None,
    )


def _make_trigger(trigger: Trigger | None) -> IncidentTrigger | None:
    if trigger is None:
        return None
    return IncidentTrigger(
        trigger.counter, round(trigger.bytes_each), _to_percent(trigger.confidence)
    )


def _to_percent(fraction: float) -> int:
    return min(100, max(0, round(100 * fraction)))


def _round_or_none(value: float | None, factor: int = 1) -> int | None:
    return None if value is None else round(value * factor)
