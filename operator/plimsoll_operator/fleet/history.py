"""Which revision is wanted, which one runs, and which one to go back to.

``status.revisions`` remembers it: ``update`` is the present spec's, ``current`` the last one that
was rolled out completely, ``previous`` the one before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.operation import OnLeak, RunRevision
from plimsoll_operator.fleet.suspect import Suspect
from plimsoll_operator.kinds import Object


@dataclass(frozen=True)
class Course:
    """What a roll-out does about a bad revision. ``revision`` is the one to run; ``requested``
    says that a person asked for the last good one, not a leak."""

    revision: str
    paused: bool = False
    action: str = "None"
    requested: bool = False


def advanced(before: dict[str, str], update: str, rolled_out: str) -> dict[str, str]:
    """``status.revisions`` after an observation; ``rolled_out`` is the revision that runs
    completely, empty where one is under way.

    What was gone back from is forgotten: nobody wants to go back to it later.
    """
    current, previous = before.get("current", ""), before.get("previous", "")
    if rolled_out and current != rolled_out:
        current, previous = rolled_out, current if rolled_out == update else ""
    found = {"update": update, "current": current, "previous": previous}
    return {key: value for key, value in found.items() if value}


def course(
    service: InferenceService, status: Object, update: str, suspect: Suspect | None, known: set[str]
) -> Course:
    """What to run. ``known`` are the revisions whose template still exists.

    A roll-back that was begun goes on until the spec changes: its evidence ages and goes.
    """
    if service.spec.rollout.revision is RunRevision.LAST_GOOD:
        target = last_good(status.get("revisions") or {}, update)
        if target in known:
            return Course(target, action="RolledBack", requested=True)
        return Course(update, requested=True)
    remembered = (status.get("suspectRevision") or {}).get("revision") == update
    if not remembered and suspect is None:
        return Course(update)
    match service.spec.rollout.on_leak:
        case OnLeak.CONTINUE:
            return Course(update, action="Reported")
        case OnLeak.HOLD:
            return _held(status, update)
        case OnLeak.ROLLBACK:
            target = last_good(status.get("revisions") or {}, update)
            if target in known:
                return Course(target, action="RolledBack")
            return _held(status, update)


def last_good(revisions: dict[str, str], bad: str) -> str:
    """The newest completely rolled out revision that is not ``bad``, empty where there is none."""
    for name in ("current", "previous"):
        if revisions.get(name) not in (None, "", bad):
            return revisions[name]
    return ""


def _held(status: Object, update: str) -> Course:
    """A roll-out that is under way stops; one that is done is only reported."""
    if (status.get("revisions") or {}).get("current") == update:
        return Course(update, action="Reported")
    return Course(update, paused=True, action="Held")


def told(
    suspect: Suspect | None, before: Object, update: str, action: str, changed: list[str]
) -> dict[str, Any] | None:
    """``status.suspectRevision``: what is known now, else what was known of the same revision."""
    known: dict[str, Any] | None = before.get("suspectRevision")
    if suspect is None:
        return known | {"action": action} if known and known.get("revision") == update else None
    return {
        "revision": suspect.revision,
        "leak": suspect.leak,
        "since": suspect.since,
        "leakingReplicas": suspect.leaking,
        "replicas": suspect.replicas,
        "action": action,
        "changed": changed,
    }
