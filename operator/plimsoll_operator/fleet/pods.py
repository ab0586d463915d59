"""What a pod says of its containers: their last ends, and words that may stand in a status.

Containers that end again and again show in what the kubelet remembers of their last run.

The verdict must not change while such a container alternates between running and waiting: it
follows from counts and times in the pod's status, and from nothing that the operator remembers.

Words of the kubelet, of a log or of a manifest come from a pod: they are cleaned and bounded.
"""

from __future__ import annotations

import re
import unicodedata

from plimsoll_api.times import unix_seconds
from plimsoll_operator.kinds import Object

BACKOFF_RESET_S = 600.0
"""The kubelet forgets the crashes of a container that has run this long."""

SETTLE_S = 30.0
"""The least that a container must run to count as recovered; else twice its last run."""

PLANNED_EXIT_CODES = (0, 143)
"""Exit codes of a container that was told to end, as a planned restart does."""


MAX_TEXT = 400
MAX_LINES = 3
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def crash_looping(pod: Object, container: Object, now: str) -> bool:
    """Whether ``container`` ended at least twice and is not over it yet: see :func:`unsettled`."""
    state = container.get("state") or {}
    ended = "terminated" in state or _backs_off(state)
    return container.get("restartCount", 0) + ended >= 2 and unsettled(pod, container, now)


def unsettled(pod: Object, container: Object, now: str) -> bool:
    """Return whether the last end of ``container`` still counts.

    It does if the run before it was short, and the present one has not outlived it. ``now`` is RFC
    3339, empty if no time has passed.
    """
    state = container.get("state") or {}
    if not last_end(container):
        return False
    if "waiting" in state:
        return _backs_off(state)
    settled = settled_s(pod, container)
    if settled is None:
        return False
    running = (state.get("running") or {}).get("startedAt")
    return not (running and now) or seconds(running, now) < settled


def _backs_off(state: Object) -> bool:
    return (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"


def settled_s(pod: Object, container: Object) -> float | None:
    """Return how many seconds a new run must last to count as recovered.

    None if the last one was so long that its end stands for itself.
    """
    last = last_end(container)
    if not (last.get("startedAt") and last.get("finishedAt")):
        return SETTLE_S
    ran = seconds(last["startedAt"], last["finishedAt"])
    longest = BACKOFF_RESET_S
    if last.get("exitCode") not in PLANNED_EXIT_CODES:
        # An engine that takes long to load may end each time before it was ever ready.
        longest = max(longest, 2 * _startup_s(pod, container["name"]))
    return None if ran >= longest else min(longest, max(2 * ran, SETTLE_S))


def _startup_s(pod: Object, name: str) -> float:
    spec = pod.get("spec") or {}
    for one in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        if one["name"] == name and (probe := one.get("startupProbe")):
            return float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))
    return 0.0


def any_killed(pod: Object) -> bool:
    """Whether the last end of a container of ``pod`` was a kill for memory."""
    return any(last_end(one).get("reason") == "OOMKilled" for one in statuses(pod))


def any_looping(pod: Object, now: str) -> bool:
    """Whether a container of ``pod`` is :func:`crash_looping`."""
    return any(crash_looping(pod, one, now) for one in statuses(pod))


def last_end(container: Object) -> Object:
    """How the last run of ``container`` ended (``state.terminated``), empty where none did."""
    for state in (container.get("state"), container.get("lastState")):
        if ended := (state or {}).get("terminated"):
            found: Object = ended
            return found
    return {}


def statuses(pod: Object) -> list[Object]:
    """Status of every container of ``pod``, init containers included."""
    status = pod.get("status") or {}
    return [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]


def seconds(since: str, until: str) -> float:
    """Between two times as the API writes them."""
    return unix_seconds(until) - unix_seconds(since)


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return the beginning of ``text`` as one printable line of at most ``limit`` characters."""
    whole = _printable(_ANSI.sub("", text[: 8 * limit]))
    return whole if len(whole) <= limit else f"{whole[: limit - 3].rstrip()}..."


def last_lines(text: str, limit: int = MAX_TEXT) -> str:
    """Return the end of a log as one printable line of at most ``limit`` characters."""
    lines = [_printable(line) for line in _ANSI.sub("", text[-8 * limit :]).splitlines()]
    whole = " | ".join([line for line in lines if line][-MAX_LINES:])
    return whole if len(whole) <= limit else f"...{whole[3 - limit :].lstrip()}"


def _printable(text: str) -> str:
    """One line without control, format (bidirectional overrides) and unassigned characters."""
    kept = (" " if unicodedata.category(one)[0] in "CZ" else one for one in text)
    return " ".join("".join(kept).split())
