"""Which rungs of the remediation ladder may be tried for an incident, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.admin import Capability, Role
from plimsoll_api.supervision import Action
from plimsoll_sidecar.detect.assessment import Kind

NEEDS = {
    Action.TRIM: Capability.TRIM,
    Action.WORKER_RESTART: Capability.RESTART_WORKER,
    Action.ENGINE_RESTART: Capability.RESTART_ENGINE,
}
CURABLE = frozenset({Kind.HOST_GROWTH, Kind.DEVICE_GROWTH, Kind.STALL, Kind.CAPACITY_LOSS})
"""The others are reported only: the process that held the memory is gone already."""


def why_not(
    action: Action,
    kind: Kind,
    owner: str | None,
    ladder: Iterable[Action],
    capabilities: Iterable[Capability],
    answers: bool,
) -> str | None:
    """Why this rung is skipped, in words for the timeline; None when it may be tried.

    ``owner`` is the role of the process that grows: a new worker cures the worker's memory only.
    ``answers`` says whether the engine's admin API can be asked for anything at all; an engine
    that does not answer can still be restarted by signals.
    """
    if action not in ladder:
        return "not in this service's ladder"
    if action not in NEEDS:
        return "done by nobody in this version"
    if kind not in CURABLE:
        return f"no action of the supervisor cures {kind.value}"
    if action is Action.ENGINE_RESTART and not answers:
        return None
    if NEEDS[action] not in capabilities:
        return "the engine cannot do it"
    if action is Action.TRIM and kind is Kind.STALL:
        return "a stalled worker cannot trim"
    if action is Action.WORKER_RESTART and owner == Role.FRONTEND:
        return "the frontend holds the memory, a new worker would not return it"
    if not answers:
        return "the engine's frontend does not answer"
    return None


def next_disruptive(
    kind: Kind,
    owner: str | None,
    tried: Iterable[Action],
    ladder: Iterable[Action],
    capabilities: Iterable[Capability],
    answers: bool,
) -> Action | None:
    """The lightest restart that is allowed and was not tried yet."""
    for action in (Action.WORKER_RESTART, Action.ENGINE_RESTART):
        if action in tried:
            continue
        if why_not(action, kind, owner, ladder, capabilities, answers) is None:
            return action
    return None
