"""Which revision is wanted, which one runs, and which one to go back to.

``status.revisions`` keeps it: ``update`` is the present spec's, ``current`` the last one that
was rolled out completely, ``good`` those to go back to, newest first. A revision is good once it
ran in all replicas, and no longer when most of them leak or somebody goes back from it. That is
decided with the roll-back, not at its end: the spec may change while pods are still replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.operation import OnLeak, RunRevision
from plimsoll_operator.fleet.suspects import Suspect
from plimsoll_operator.kinds import Object


@dataclass(frozen=True)
class RolloutDecision:
    """What a rollout does about a bad revision.

    ``revision`` is the one to run; ``requested`` says that a person asked for the last good one,
    not a leak.
    """

    revision: str
    paused: bool = False
    action: str = "None"
    requested: bool = False


MAX_GOOD = 2
"""The spec's own revision may be one of them; then there is another one to go back to."""


def advanced(before: Object, update: str, rolled_out: str, bad: str) -> Object:
    """``status.revisions`` after an observation.

    ``rolled_out`` is the revision that runs in all replicas, empty while a roll-out is under way;
    ``bad`` is one that leaks or that is gone back from, empty where there is none.
    """
    known = dict.fromkeys([rolled_out, *good(before)])
    kept = [one for one in known if one not in ("", bad)][:MAX_GOOD]
    current = rolled_out or before.get("current", "")
    previous = next((one for one in kept if one != current), "")
    named = {"update": update, "current": current, "previous": previous}
    return {key: value for key, value in named.items() if value} | {"good": kept}


def good(revisions: Object) -> list[str]:
    """Good revisions, newest first. Earlier operators wrote ``current`` and ``previous`` alone."""
    if "good" in revisions:
        return list(revisions["good"])
    return [revisions[name] for name in ("current", "previous") if revisions.get(name)]


def decide(
    service: InferenceService,
    status: Object,
    update: str,
    suspect: Suspect | None,
    known: Collection[str],
    running: str = "",
) -> RolloutDecision:
    """Decide which revision to run.

    ``known`` are the revisions whose template still exists, and ``running`` is the one that the
    Deployment has. A rollback that was begun goes on until the spec changes: its evidence ages and
    goes.
    """
    target = last_good(status.get("revisions") or {}, update, known, running)
    if service.spec.rollout.revision is RunRevision.LAST_GOOD:
        if target:
            return RolloutDecision(target, action="RolledBack", requested=True)
        return RolloutDecision(update, requested=True)
    known_suspect = (status.get("suspectRevision") or {}).get("revision") == update
    if not known_suspect and suspect is None:
        return RolloutDecision(update)
    match service.spec.rollout.on_leak:
        case OnLeak.CONTINUE:
            return RolloutDecision(update, action="Reported")
        case OnLeak.HOLD:
            return _held(status, update)
        case OnLeak.ROLLBACK:
            if target:
                return RolloutDecision(target, action="RolledBack")
            return _held(status, update)


def last_good(revisions: Object, update: str, known: Collection[str], running: str = "") -> str:
    """Return the revision to go back to from ``update``, empty if there is none.

    This is the newest good one, unless another good one runs already: then somebody has gone back
    to it.
    """
    found = [one for one in good(revisions) if one != update and one in known]
    return running if running in found else next(iter(found), "")


def _held(status: Object, update: str) -> RolloutDecision:
    """Stop a rollout that is under way; only report one that is done."""
    if (status.get("revisions") or {}).get("current") == update:
        return RolloutDecision(update, action="Reported")
    return RolloutDecision(update, paused=True, action="Held")
