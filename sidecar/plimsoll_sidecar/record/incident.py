"""A LeakIncident object as Kubernetes stores it, made from the governor's incident."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from plimsoll_api.supervision import ServiceRef
from plimsoll_sidecar.detect.assessment import Trigger
from plimsoll_sidecar.govern.incident import Incident, Step
from plimsoll_sidecar.record.kube import Object

GROUP = "plimsoll.dev"
VERSION = "v1alpha1"
PLURAL = "leakincidents"
SERVICE_LABEL = "plimsoll.dev/service"
MAX_MESSAGE = 1024
MAX_ITEMS = 32
"""Bounds of the resource definition for lists of sentences and of files."""


class IncidentSpec(msgspec.Struct, rename="camel"):
    """The identity; it never changes."""

    service: str
    pod: str
    container: str
    epoch: str
    opened_at: str
    kind: str


class IncidentTrigger(msgspec.Struct, rename="camel"):
    counter: str
    bytes_each: int
    confidence: float


class IncidentAttribution(msgspec.Struct, rename="camel", omit_defaults=True):
    confidence: float
    bytes: int
    evidence: list[str]
    segment: str | None = None
    process: str | None = None
    bytes_per_hour: int | None = None
    bytes_per_request: int | None = None
    trigger: IncidentTrigger | None = None


class IncidentStep(msgspec.Struct, rename="camel", omit_defaults=True):
    time: str
    step: str
    outcome: str
    before_bytes: int | None = None
    after_bytes: int | None = None
    message: str | None = None


class IncidentStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    phase: str
    attribution: IncidentAttribution
    timeline: list[IncidentStep]
    consumed_percent: int
    diagnostics: list[str] = []
    outcome: str | None = None
    message: str | None = None
    returned_bytes: int | None = None
    confirmed_at: str | None = None
    ended_at: str | None = None


def rfc3339(at: float) -> str:
    """Unix seconds as Kubernetes' Time: whole seconds, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def spec_of(incident: Incident, service: str, pod: str, container: str) -> IncidentSpec:
    return IncidentSpec(
        service=service,
        pod=pod,
        container=container,
        epoch=incident.epoch,
        opened_at=rfc3339(incident.opened_at),
        kind=incident.kind.value,
    )


def status_of(incident: Incident) -> IncidentStatus:
    seen = incident.attribution
    return IncidentStatus(
        phase=incident.phase.value,
        attribution=IncidentAttribution(
            segment=seen.segment,
            process=seen.process,
            bytes=seen.bytes,
            bytes_per_hour=_whole(seen.bytes_per_s, 3600),
            bytes_per_request=_whole(seen.bytes_per_request),
            trigger=_trigger(seen.trigger),
            confidence=round(seen.confidence, 3),
            evidence=[text[:MAX_MESSAGE] for text in seen.evidence[:MAX_ITEMS]],
        ),
        timeline=[_step(step) for step in incident.timeline],
        outcome=incident.reason.value if incident.reason else None,
        message=incident.message[:MAX_MESSAGE] or None,
        returned_bytes=incident.returned_bytes,
        consumed_percent=round(100 * incident.consumed_ratio),
        diagnostics=incident.diagnostics[:MAX_ITEMS],
        confirmed_at=rfc3339(incident.confirmed_at) if incident.confirmed_at else None,
        ended_at=rfc3339(incident.ended_at) if incident.ended_at else None,
    )


def path_of(namespace: str, name: str, subresource: str = "") -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}" + (
        f"/{subresource}" if subresource else ""
    )


def object_of(incident: Incident, service: ServiceRef, pod: str, container: str) -> Object:
    """The object for server-side apply, without its status (a subresource)."""
    return _base(incident, service) | {
        "spec": msgspec.to_builtins(spec_of(incident, service.name, pod, container)),
    }


def status_object_of(incident: Incident, service: ServiceRef) -> Object:
    """What is applied on the status subresource."""
    body: Object = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeakIncident",
        "metadata": {"name": incident.name, "namespace": service.namespace},
        "status": msgspec.to_builtins(status_of(incident)),
    }
    return body


def _base(incident: Incident, service: ServiceRef) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeakIncident",
        "metadata": {
            "name": incident.name,
            "namespace": service.namespace,
            "labels": {SERVICE_LABEL: service.name[:63]},
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "InferenceService",
                    "name": service.name,
                    "uid": service.uid,
                }
            ],
        },
    }


def _step(step: Step) -> IncidentStep:
    return IncidentStep(
        time=rfc3339(step.time),
        step=step.step,
        outcome=step.outcome.value,
        before_bytes=step.before_bytes,
        after_bytes=step.after_bytes,
        message=step.message[:MAX_MESSAGE] or None,
    )


def _trigger(trigger: Trigger | None) -> IncidentTrigger | None:
    if trigger is None:
        return None
    return IncidentTrigger(trigger.counter, round(trigger.bytes_each), round(trigger.confidence, 3))


def _whole(value: float | None, factor: int = 1) -> int | None:
    return None if value is None else round(value * factor)
