"""Parse a pod's status, and find out why a container is not ready or cannot start.

The cause is derived from restart counts and timestamps rather than from the momentary state of the
container, so it stays the same throughout a crash loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll_api.names import REVISION_LABEL
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.workloads import find_lws_group
from plimsoll_operator.fleet.claimed_devices import ClaimUse, list_claim_uses
from plimsoll_operator.fleet.device_health import list_unhealthy_devices
from plimsoll_operator.fleet.missing_claims import list_missing_claims
from plimsoll_operator.fleet.untrusted_text import (
    MAX_LINE_CHARS,
    join_last_lines,
    make_printable_line,
)
from plimsoll_operator.kinds import Object

BACKOFF_RESET_S = 600.0
"""Run time in seconds after which the kubelet resets a container's back-off."""
MIN_RECOVERY_RUN_S = 30.0
"""Minimum run time after which a container counts as recovered, if it also ran twice as long as
before."""
PLANNED_EXIT_CODES = (0, 143)
"""Exit codes of a container that was stopped on request."""
MIN_AGE_FOR_EVENTS_S = 10.0
"""Minimum age of a pod without containers before its Events are read."""
MAX_EVENT_AGE_S = 180.0
"""Maximum age of an Event that counts; the kubelet retries a volume at least every two minutes."""
CREATION_EVENT_REASONS = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"}
)
"""Reasons of Events that explain why a container is not created."""
ENDED_POD_PHASES = ("Succeeded", "Failed")

_CREATING_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff"})
_PULL_PREFIX_PATTERN = re.compile(r'^Back-off pulling image "[^"]*": ErrImagePull: ')
_WORD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")

Events = Mapping[str, Sequence[Object]]
"""Events of pods that wait for a volume or a sandbox, by pod name."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Reason why a container is not ready; ``blocking`` is True if only a person can fix it."""

    reason: str
    message: str
    blocking: bool = True


@dataclass(frozen=True, slots=True)
class Container:
    """Status of a container; absent texts are empty, and times are RFC 3339.

    ``reason`` and ``text`` are those of a waiting container. ``terminations`` are newest first.
    ``startup_s`` is the time that the startup probe allows, and ``memory`` the memory limit.
    """

    name: str
    ready: bool
    started: bool
    restarts: int
    state: str
    reason: str
    text: str
    running_since: str
    terminations: tuple[Object, ...]
    startup_s: float
    memory: str

    @property
    def last_termination(self) -> Object:
        """Last termination of the container; empty if it has never terminated."""
        return self.terminations[0] if self.terminations else {}

    @property
    def is_backing_off(self) -> bool:
        """Whether the kubelet waits before it restarts the container."""
        return self.reason == "CrashLoopBackOff"

    @property
    def was_oom_killed(self) -> bool:
        """Whether the container's last termination was an OOM kill."""
        return self.last_termination.get("reason") == "OOMKilled"

    @property
    def is_completed(self) -> bool:
        """Whether the container completed successfully."""
        return self.state == "terminated" and self.last_termination.get("exitCode") == 0

    @property
    def is_creating(self) -> bool:
        """Whether the kubelet has not created the container yet."""
        return self.reason in _CREATING_REASONS and not self.restarts and not self.last_termination

    @property
    def required_run_s(self) -> float | None:
        """Seconds that the current run must last before recovery; None outside a crash loop."""
        if not (self.last_termination.get("startedAt") and self.last_termination.get("finishedAt")):
            return MIN_RECOVERY_RUN_S
        ran = compute_seconds_between(
            self.last_termination["startedAt"], self.last_termination["finishedAt"]
        )
        longest = BACKOFF_RESET_S
        if self.last_termination.get("exitCode") not in PLANNED_EXIT_CODES:
            # A slow engine may terminate each time before it becomes ready.
            longest = max(longest, 2 * self.startup_s)
        return None if ran >= longest else min(longest, max(2 * ran, MIN_RECOVERY_RUN_S))

    def is_unsettled(self, now: str) -> bool:
        """Report whether the container has not recovered from its last termination.

        If ``now`` (RFC 3339) is empty, the time of the last status update is used.
        """
        if not self.last_termination:
            return False
        if self.state == "waiting":
            return self.is_backing_off
        if self.required_run_s is None:
            return False
        running = self.running_since
        return not (running and now) or compute_seconds_between(running, now) < self.required_run_s

    def is_looping(self, now: str) -> bool:
        """Report whether the container terminated at least twice and has not recovered."""
        ended = self.state == "terminated" or self.is_backing_off
        return self.restarts + ended >= 2 and self.is_unsettled(now)

    def find_cause(self, now: str) -> Cause:
        """Return why the container is not ready, according to its own status."""
        if self.state == "terminated" or self.is_unsettled(now):
            return self._describe_termination()
        if self.state == "waiting":
            reason, text = (
                _sanitize_reason(self.reason or "Waiting"),
                make_printable_line(self.text),
            )
            if reason in _PULL_REASONS:  # the kubelet alternates between the two reasons
                reason, text = "ImagePullBackOff", _PULL_PREFIX_PATTERN.sub("", text)
            message = f"{reason} ({text})" if text else reason
            return Cause(reason, message, blocking=reason not in _CREATING_REASONS)
        return Cause("NotReady", "the container is running but not ready", blocking=False)

    def _describe_termination(self) -> Cause:
        """Describe the last termination in words that stay the same after each restart."""
        text = join_last_lines(str(self.last_termination.get("message") or ""))
        how = (
            "OOMKilled"
            if self.was_oom_killed
            else f"exit code {self.last_termination.get('exitCode')}"
        )
        reason = "OOMKilled" if self.was_oom_killed else "ContainerExited"
        return Cause(reason, f"ended: {how}{f' ({text})' if text else ''}")


@dataclass(frozen=True, slots=True)
class PodView:
    """Parsed status of a pod.

    ``has_ended`` is True in phase ``Succeeded`` or ``Failed``. ``group`` is the pod's
    LeaderWorkerSet group; empty for a single-pod replica.
    """

    name: str
    uid: str
    created: str
    revision: str
    terminating: bool
    has_ended: bool
    scheduled_at: str
    unscheduled_cause: Cause | None
    init_containers: tuple[Container, ...]
    main_containers: tuple[Container, ...]
    group: str = ""
    unhealthy_devices: tuple[str, ...] = ()
    claim_uses: tuple[ClaimUse, ...] = ()

    @classmethod
    def parse(cls, pod: Object) -> PodView:
        """Parse a pod from the API server."""
        meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        placed, unscheduled = "", None
        for entry in status.get("conditions") or ():
            if entry["type"] == "PodScheduled":
                placed = str(entry.get("lastTransitionTime") or "")
                if entry["status"] == "False":
                    reason = _sanitize_reason(entry.get("reason") or "Unschedulable")
                    unscheduled = Cause(
                        reason, make_printable_line(str(entry.get("message") or reason))
                    )
        if not placed and (claims := list_missing_claims(pod)):
            message = make_printable_line(
                f"not scheduled: check that {' and '.join(claims)} exist; see the pod's Events"
            )
            unscheduled = Cause("ResourceClaimMissing", message, blocking=False)
        labels = meta.get("labels") or {}
        specs = {
            entry["name"]: entry
            for entry in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        }
        return cls(
            name=str(meta["name"]),
            uid=str(meta.get("uid") or ""),
            created=str(meta.get("creationTimestamp") or ""),
            revision=str(labels.get(REVISION_LABEL, "")),
            terminating=bool(meta.get("deletionTimestamp")),
            has_ended=status.get("phase") in ENDED_POD_PHASES,
            scheduled_at=placed,
            unscheduled_cause=unscheduled,
            init_containers=_parse_containers(status.get("initContainerStatuses"), specs),
            main_containers=_parse_containers(status.get("containerStatuses"), specs),
            group=find_lws_group(labels),
            unhealthy_devices=list_unhealthy_devices(pod),
            claim_uses=list_claim_uses(pod),
        )

    @classmethod
    def make_without_containers(
        cls, name: str, uid: str, created: str, terminating: bool
    ) -> PodView:
        """Return a view of a pod whose containers are unknown."""
        return cls(name, uid, created, "", terminating, False, "", None, (), ())

    @property
    def containers(self) -> tuple[Container, ...]:
        """All containers, init containers last."""
        return self.main_containers + self.init_containers

    @property
    def is_ready(self) -> bool:
        """Whether every container is ready or has completed."""
        return bool(self.containers) and all(
            one.ready or one.is_completed for one in self.containers
        )

    @property
    def is_creating(self) -> bool:
        """Whether the pod is scheduled but has no container yet."""
        return bool(self.containers) and all(one.is_creating for one in self.containers)

    def compute_creation_wait_s(self, now: str) -> float | None:
        """Return the seconds since the pod was scheduled; None unless :attr:`is_creating`."""
        return (
            compute_seconds_between(self.scheduled_at or self.created or now, now)
            if self.is_creating
            else None
        )

    def find_cause(self, name: str, events: Sequence[Object] = (), now: str = "") -> Cause | None:
        """Return why the pod's container ``name`` is not ready; None if it is ready."""
        found = next((one for one in self.containers if one.name == name), None)
        if found is None:
            return self.unscheduled_cause or Cause(
                "NotStarted", "the container has not started", blocking=False
            )
        if found.ready:
            return None
        if self.unhealthy_devices:
            message = f"unhealthy device: {', '.join(self.unhealthy_devices)}"
            own = found.find_cause(now)
            return Cause(
                "DeviceUnhealthy", make_printable_line(f"{message}; {own.message}"), own.blocking
            )
        if self.is_creating:
            return _find_mount_failure(events) or found.find_cause(now)
        if found.reason in _CREATING_REASONS and (
            before := self._find_unfinished_init_container(name)
        ):
            inner = before.find_cause(now)
            return Cause(inner.reason, f"{before.name}: {inner.message}", inner.blocking)
        return found.find_cause(now)

    def find_blocking_cause(self, events: Sequence[Object] = (), now: str = "") -> Cause | None:
        """Return why the pod cannot become ready without a person; None if no cause is known."""
        if self.unscheduled_cause and self.unscheduled_cause.blocking:
            return self.unscheduled_cause
        if self.is_creating and (found := _find_mount_failure(events)):
            return found
        for one in (*self.init_containers, *self.main_containers):
            if not (one.ready or one.is_completed) and (found := one.find_cause(now)).blocking:
                return Cause(found.reason, f"{make_printable_line(one.name, 63)}: {found.message}")
        return None

    def _find_unfinished_init_container(self, name: str) -> Container | None:
        for one in self.init_containers:
            if one.name == name:
                return None
            if not (one.is_completed or one.ready or one.started):
                return one
        return None


def find_not_ready_pods(
    pods: Iterable[PodView], name: str, events: Events, now: str
) -> list[tuple[str, Cause]]:
    """Return the pods whose container ``name`` is not ready, with causes; blocking ones first.

    ``now`` is RFC 3339.
    """
    found = [
        (pod.name, cause)
        for pod in sorted(pods, key=lambda one: one.name)
        if (cause := pod.find_cause(name, events.get(pod.name, ()), now))
    ]
    return sorted(found, key=lambda one: not one[1].blocking)


def compute_next_change_s(pods: Iterable[PodView], now: str) -> float | None:
    """Return the seconds until a cause may change without a new status; None if none can."""
    due = []
    for pod in pods:
        creating_s = pod.compute_creation_wait_s(now)
        if creating_s is not None and creating_s < MIN_AGE_FOR_EVENTS_S:
            due.append(MIN_AGE_FOR_EVENTS_S - creating_s)
        for one in pod.containers:
            if one.running_since and one.required_run_s is not None and one.is_unsettled(now):
                due.append(one.required_run_s - compute_seconds_between(one.running_since, now))
    return max(1.0, min(due)) if due else None


def compute_seconds_between(since: str, until: str) -> float:
    """Return the seconds from ``since`` to ``until``. Raises ValueError for a malformed time."""
    return parse_rfc3339(until) - parse_rfc3339(since)


def _parse_containers(
    statuses: Sequence[Object] | None, specs: Mapping[str, Object]
) -> tuple[Container, ...]:
    return tuple(_parse_container(one, specs.get(one["name"], {})) for one in statuses or ())


def _parse_container(status: Object, spec: Object) -> Container:
    state = status.get("state") or {}
    waiting, probe = state.get("waiting") or {}, spec.get("startupProbe") or {}
    ends = [(one or {}).get("terminated") for one in (state, status.get("lastState"))]
    limits = (spec.get("resources") or {}).get("limits") or {}
    return Container(
        name=str(status["name"]),
        ready=bool(status.get("ready")),
        started=bool(status.get("started")),
        restarts=int(status.get("restartCount") or 0),
        state=next((one for one in ("terminated", "waiting", "running") if one in state), ""),
        reason=str(waiting.get("reason") or ""),
        text=str(waiting.get("message") or "")[: 8 * MAX_LINE_CHARS],
        running_since=str((state.get("running") or {}).get("startedAt") or ""),
        terminations=tuple(filter(None, ends)),
        startup_s=float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))
        if probe
        else 0.0,
        memory=str(limits.get("memory") or ""),
    )


# The kubelet's message differs at each attempt, so the alphabetically first one is used.
def _find_mount_failure(events: Sequence[Object]) -> Cause | None:
    relevant = [
        one for one in events if one.get("reason") in CREATION_EVENT_REASONS and one.get("message")
    ]
    if not relevant:
        return None
    newest = max(_get_event_time(one) for one in relevant)
    recent = [
        one
        for one in relevant
        if not newest or compute_seconds_between(_get_event_time(one), newest) <= MAX_EVENT_AGE_S
    ]
    reason, text = min(
        (str(one["reason"]), make_printable_line(str(one["message"]))) for one in recent
    )
    return Cause(reason, f"{reason} ({text})")


def _get_event_time(event: Object) -> str:
    timestamp = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    return str(timestamp or event["metadata"].get("creationTimestamp") or "")


def _sanitize_reason(reason: object) -> str:
    text = str(reason)
    return text if _WORD_PATTERN.fullmatch(text) else "ContainersNotReady"
