"""What the containers of a service's pods say: which are ready, and why one cannot start.

The kubelet's words and the last lines of a container's log come from a pod: they are cleaned and
bounded before they stand in a status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll_operator.fleet.pods import (
    clean,
    last_end,
    last_lines,
    seconds,
    settled_s,
    statuses,
    unsettled,
)
from plimsoll_operator.kinds import Object

CREATING_S = 10.0
"""A pod whose containers are not created after this has Events worth reading."""

_CREATING = frozenset({"ContainerCreating", "PodInitializing"})
_PULL = frozenset({"ErrImagePull", "ImagePullBackOff"})
_PULL_PREFIX = re.compile(r'^Back-off pulling image "[^"]*": ErrImagePull: ')
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


@dataclass(frozen=True)
class Cause:
    """Why a container is not ready. ``blocking``: it will not become ready just by waiting."""

    reason: str
    message: str
    blocking: bool = True


def cause(pod: Object, name: str, events: Sequence[Object] = (), now: str = "") -> Cause | None:
    """Why the container ``name`` of ``pod`` is not ready, None where it is.

    ``events`` are those of the pod: nothing else reports a volume that cannot be mounted.
    """
    found = [one for one in statuses(pod) if one["name"] == name]
    if found and found[0].get("ready"):
        return None
    if not found:
        return _unscheduled(pod) or Cause("NotStarted", "not started", blocking=False)
    if creating(pod):
        return _unmounted(events) or _of(pod, found[0], now)
    waiting = (found[0].get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _CREATING:
        before = _first_unfinished(pod, name)
        if before is not None:
            inner = _of(pod, before, now)
            return Cause(inner.reason, f"{before['name']}: {inner.message}", inner.blocking)
    return _of(pod, found[0], now)


def _of(pod: Object, container: Object, now: str) -> Cause:
    state = container.get("state") or {}
    if "terminated" in state or unsettled(pod, container, now):
        return _ended(container)
    if "waiting" in state:
        reason = _word(state["waiting"].get("reason") or "Waiting")
        text = clean(str(state["waiting"].get("message") or ""))
        if reason in _PULL:  # it alternates between the two
            reason, text = "ImagePullBackOff", _PULL_PREFIX.sub("", text)
        message = f"{reason} ({text})" if text else reason
        return Cause(reason, message, blocking=reason not in _CREATING)
    return Cause("NotReady", "running, not ready", blocking=False)


def _ended(container: Object) -> Cause:
    """How the last run ended, in words that stay the same from one restart to the next."""
    last = last_end(container)
    text = last_lines(str(last.get("message") or ""))
    code = last.get("exitCode")
    how = "OOMKilled" if last.get("reason") == "OOMKilled" else f"exit code {code}"
    reason = "OOMKilled" if last.get("reason") == "OOMKilled" else "ContainerExited"
    return Cause(reason, f"ended: {how}{f' ({text})' if text else ''}")


def _unscheduled(pod: Object) -> Cause | None:
    """Return the scheduler's sentence, for example about devices that no node has left."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            reason = _word(one.get("reason") or "Unschedulable")
            return Cause(reason, clean(str(one.get("message") or reason)))
    return None


def _first_unfinished(pod: Object, name: str) -> Object | None:
    """Find the init container that ``name`` waits for."""
    found: list[Object] = (pod.get("status") or {}).get("initContainerStatuses") or []
    for one in found:
        if one["name"] == name:
            return None
        done = ((one.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        if not (done or one.get("ready") or one.get("started")):
            return one
    return None


def creating(pod: Object) -> bool:
    """Whether ``pod`` has a node and none of its containers was created yet."""
    found = statuses(pod)
    return bool(found) and all(
        ((one.get("state") or {}).get("waiting") or {}).get("reason") in _CREATING
        and not one.get("restartCount")
        and not one.get("lastState")
        for one in found
    )


def creating_s(pod: Object, now: str) -> float | None:
    """Seconds since ``pod``, which is :func:`creating`, was given a node; None for any other."""
    if not creating(pod):
        return None
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one["type"] == "PodScheduled" and one.get("lastTransitionTime"):
            return seconds(one["lastTransitionTime"], now)
    return seconds(pod["metadata"].get("creationTimestamp") or now, now)


def _unmounted(events: Sequence[Object]) -> Cause | None:
    """Return what the kubelet last said about the pod's volumes or its sandbox.

    It repeats itself in several wordings: of the recent ones the first by the alphabet counts, so
    that a status does not change with each try.
    """
    relevant = [one for one in events if one.get("reason") in EVENT_REASONS and one.get("message")]
    if not relevant:
        return None
    newest = max(_at(one) for one in relevant)
    recent = [one for one in relevant if not newest or seconds(_at(one), newest) <= RECENT_S]
    reason, text = min((str(one["reason"]), clean(str(one["message"]))) for one in recent)
    return Cause(reason, f"{reason} ({text})")


EVENT_REASONS = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"}
)
"""Reasons of Events that say why no container is created."""

RECENT_S = 180.0
"""The kubelet tries a volume again after two minutes at most."""


def _at(event: Object) -> str:
    found = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    return str(found or event["metadata"].get("creationTimestamp") or "")


def again_s(pods: Sequence[Object], now: str) -> float | None:
    """Seconds until a verdict of this module changes although no pod does."""
    due = []
    for pod in pods:
        age = creating_s(pod, now)
        if age is not None and age < CREATING_S:
            due.append(CREATING_S - age)
        for one in statuses(pod):
            running = ((one.get("state") or {}).get("running") or {}).get("startedAt")
            settled = settled_s(pod, one)
            if running and settled is not None and unsettled(pod, one, now):
                due.append(settled - seconds(running, now))
    return max(1.0, min(due)) if due else None


def not_ready(
    pods: Sequence[Object], name: str, events: Mapping[str, Sequence[Object]], now: str
) -> list[tuple[str, Cause]]:
    """Pods whose container ``name`` is not ready, with the cause; those that block come first.

    ``events`` are by the pod's name.
    """
    found = []
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        pod_name = str(pod["metadata"]["name"])
        why = cause(pod, name, events.get(pod_name, ()), now)
        if why is not None:
            found.append((pod_name, why))
    return sorted(found, key=lambda one: not one[1].blocking)


def _word(reason: object) -> str:
    text = str(reason)
    return text if _WORD.fullmatch(text) else "ContainersNotReady"
