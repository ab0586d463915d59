"""A LeakIncident object as Kubernetes stores it, made from a supervisor's record."""

from __future__ import annotations

from typing import Any

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.incident_record import IncidentRecord, StepRecord
from plimsoll_api.leakincident import (
    MAX_SENTENCES,
    IncidentAttribution,
    IncidentStep,
    IncidentTarget,
    IncidentTrigger,
    LeakIncidentSpec,
    LeakIncidentStatus,
)
from plimsoll_api.names import (
    API_VERSION,
    INCIDENT_KIND,
    INCIDENT_PLURAL,
    POLICY_KIND,
    POLICY_LABEL,
    SERVICE_LABEL,
)
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import rfc3339

Object = dict[str, Any]

MAX_SENTENCE = 1024
"""Characters kept of one sentence."""


def spec_of(
    incident: IncidentRecord, service: ServiceRef, pod: str, container: str
) -> LeakIncidentSpec:
    """Return the identity of the incident, as the object has it."""
    of_policy, workload = service.kind == POLICY_KIND, service.workload
    return LeakIncidentSpec(
        service=workload.name if workload else service.name,
        pod=pod,
        container=container,
        epoch=incident.epoch,
        opened_at=rfc3339(incident.opened_at),
        kind=incident.kind,
        policy=service.name if of_policy else None,
        target=_target(service),
    )


def _target(service: ServiceRef) -> IncidentTarget | None:
    workload, group = service.workload, service.group
    if workload is None:
        return None
    return IncidentTarget(workload.kind, workload.name, group.index if group else None)


def status_of(incident: IncidentRecord) -> LeakIncidentStatus:
    """Return progress and result, with texts and lists cut to what the CRD allows."""
    seen = incident.attribution
    return LeakIncidentStatus(
        phase=incident.phase,
        attribution=IncidentAttribution(
            segment=seen.segment,
            process=seen.process,
            pod=seen.pod,
            bytes=seen.bytes,
            bytes_per_hour=_whole(seen.bytes_per_s, 3600),
            bytes_per_request=_whole(seen.bytes_per_request),
            trigger=_trigger(seen.trigger),
            confidence=round(seen.confidence, 3),
            evidence=[text[:MAX_SENTENCE] for text in seen.evidence[:MAX_SENTENCES]],
        ),
        timeline=[_step(step) for step in incident.timeline],
        waiting_reason=incident.waits.value if incident.waits else None,
        outcome=incident.reason.value if incident.reason else None,
        message=incident.message[:MAX_SENTENCE] or None,
        returned_bytes=incident.returned_bytes,
        consumed_percent=round(100 * incident.consumed_ratio),
        diagnostics=incident.diagnostics[:MAX_SENTENCES],
        confirmed_at=rfc3339(incident.confirmed_at) if incident.confirmed_at else None,
        ended_at=rfc3339(incident.ended_at) if incident.ended_at else None,
    )


def path_of(namespace: str, name: str, subresource: str = "") -> str:
    """Return the path of a LeakIncident on the API server, or of its subresource."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/{INCIDENT_PLURAL}/{name}" + (
        f"/{subresource}" if subresource else ""
    )


def object_of(incident: IncidentRecord, service: ServiceRef, pod: str, container: str) -> Object:
    """Build the LeakIncident for server-side apply, without its status (a subresource)."""
    return _base(incident, service) | {
        "spec": msgspec.to_builtins(spec_of(incident, service, pod, container)),
    }


def status_object_of(incident: IncidentRecord, service: ServiceRef) -> Object:
    """Build what the supervisor applies to the status subresource."""
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {"name": incident.name, "namespace": service.namespace},
        "status": msgspec.to_builtins(status_of(incident)),
    }
    return body


def _base(incident: IncidentRecord, service: ServiceRef) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {
            "name": incident.name,
            "namespace": service.namespace,
            "labels": _labels(service),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": service.kind,
                    "name": service.name,
                    "uid": service.uid,
                }
            ],
        },
    }


def _labels(service: ServiceRef) -> dict[str, str]:
    shown = service.workload.name if service.workload else service.name
    labels = {SERVICE_LABEL: shown[:63].rstrip("-.")}
    return labels | ({POLICY_LABEL: service.name} if service.kind == POLICY_KIND else {})


def _step(step: StepRecord) -> IncidentStep:
    return IncidentStep(
        time=rfc3339(step.time),
        step=step.step,
        outcome=step.outcome.value,
        before_bytes=step.before_bytes,
        after_bytes=step.after_bytes,
        message=step.message[:MAX_SENTENCE] or None,
    )


def _trigger(trigger: Trigger | None) -> IncidentTrigger | None:
    if trigger is None:
        return None
    return IncidentTrigger(trigger.counter, round(trigger.bytes_each), round(trigger.confidence, 3))


def _whole(value: float | None, factor: int = 1) -> int | None:
    return None if value is None else round(value * factor)
