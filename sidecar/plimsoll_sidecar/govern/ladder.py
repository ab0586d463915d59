"""Which rungs of the remediation ladder may be tried for an incident, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.admin import Capability, Role
from plimsoll_api.supervision import Action
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern.command import EngineView

NEEDS = {
    Action.TRIM: Capability.TRIM,
    Action.WORKER_RESTART: Capability.RESTART_WORKER,
    Action.ENGINE_RESTART: Capability.RESTART_ENGINE,
}
CURABLE = frozenset({Kind.HOST_GROWTH, Kind.DEVICE_GROWTH, Kind.STALL, Kind.CAPACITY_LOSS})
"""The others are reported only: the process that held the memory is gone already."""


def why_not(
    action: Action, kind: Kind, owner: str | None, ladder: Iterable[Action], engine: EngineView
) -> str | None:
    """Why this rung is skipped, in words for the timeline; None when it may be tried.

    ``owner`` is the role of the process that grows: a new worker cures the worker's memory only.
    An engine that does not answer can still be restarted by signals, and its pod replaced.
    """
    if action not in ladder:
        return "not in this service's ladder"
    if kind not in CURABLE:
        return f"no action of the supervisor cures {kind.value}"
    if action is Action.POD_REPLACE:
        return None if engine.replaceable else "outside of a cluster nobody replaces a pod"
    if action is Action.ENGINE_RESTART and not engine.answers:
        return None
    if NEEDS[action] not in engine.capabilities:
        return "the engine cannot do it"
    if action is Action.TRIM and kind is Kind.STALL:
        return "a stalled worker cannot trim"
    if action is Action.WORKER_RESTART and owner == Role.FRONTEND:
        return "the frontend holds the memory, a new worker would not return it"
    if not engine.answers:
        return "the engine's frontend does not answer"
    return None


def next_disruptive(
    kind: Kind,
    owner: str | None,
    tried: Iterable[Action],
    ladder: Iterable[Action],
    engine: EngineView,
) -> Action | None:
    """The lightest disruptive action that is allowed and was not tried yet."""
    for action in (Action.WORKER_RESTART, Action.ENGINE_RESTART, Action.POD_REPLACE):
        if action in tried:
            continue
        if why_not(action, kind, owner, ladder, engine) is None:
            return action
    return None
