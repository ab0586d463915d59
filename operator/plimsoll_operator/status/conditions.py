"""Conditions of an InferenceService, each with its life.

===========================  ==================================================================
``Ready``                    enough replicas take requests and the present spec is rolled out
``EngineReady``              every replica's engine container is ready
``SupervisorReady``          every replica's supervisor container is ready
``MemoryWithinBudget``       no replica has spent a growth budget; Unknown without figures
``RestartBudgetExhausted``   a supervisor may restart nothing any more until a person resets it
``Progressing``              a rollout is under way
``Stalled``                  nothing will move until somebody changes something
``OutOfMemoryKilled``        the last end of a replica's container was a kill for memory
``CrashLooping``             a replica's container ends again and again
``SuspectRevision``          the same leak is in most replicas of the present revision
``ObjectsComplete``          everything asked for exists; False where the cluster lacks an API
===========================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.inferenceservice_status import ConditionType as Type
from plimsoll_operator.fleet.history import Course
from plimsoll_operator.fleet.suspect import Suspect
from plimsoll_operator.kinds import Object
from plimsoll_operator.render import names
from plimsoll_operator.status.figures import Figures

MAX_MESSAGE = 1024


@dataclass(frozen=True)
class Verdict:
    """A condition without its times. ``status`` None is Unknown."""

    type: Type
    status: bool | None
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """Why the service cannot be made as its spec says. ``lasting``: trying again will not help."""

    reason: str
    message: str
    lasting: bool


def failed(failure: Failure) -> list[Verdict]:
    """Conditions while the spec cannot be carried out; those of running pods stay as they were."""
    message = failure.message[:MAX_MESSAGE]
    return [
        Verdict(Type.READY, False, failure.reason, message),
        Verdict(Type.PROGRESSING, not failure.lasting, failure.reason, message),
        Verdict(Type.STALLED, failure.lasting, failure.reason, message),
    ]


def rollout(
    deployment: Object | None, wanted: int, may_miss: int, trouble: str = ""
) -> list[Verdict]:
    """``Ready``, ``Progressing`` and ``Stalled`` by the Deployment's status.

    ``trouble`` is what the pods' containers wait for.
    """
    seen = (deployment or {}).get("status") or {}
    generation = ((deployment or {}).get("metadata") or {}).get("generation", 0)
    current = bool(deployment) and seen.get("observedGeneration", 0) >= generation
    ready, updated = seen.get("readyReplicas", 0), seen.get("updatedReplicas", 0)
    rolled_out = current and updated == wanted == seen.get("replicas", 0)
    ready = ready if current else 0
    count = f"{ready} of {wanted} replicas are ready{_trouble(seen)}"[:MAX_MESSAGE]
    late = any(
        one["type"] == "Progressing" and one.get("reason") == "ProgressDeadlineExceeded"
        for one in seen.get("conditions") or ()
    )
    if rolled_out and wanted == 0:
        verdict = Verdict(Type.READY, True, "ScaledToZero", "no replicas are wanted")
    elif rolled_out and ready >= max(1, wanted - may_miss):
        verdict = Verdict(Type.READY, True, "ReplicasReady", count)
    else:
        reason = "ReplicasNotReady" if rolled_out else "RollingOut"
        verdict = Verdict(Type.READY, False, reason, count)
    done = rolled_out and ready == wanted
    return [
        verdict,
        Verdict(
            Type.PROGRESSING,
            not done and not late,
            "RolloutComplete" if done else "ProgressDeadlineExceeded" if late else "RollingOut",
            count,
        ),
        Verdict(
            Type.STALLED,
            late and not done,
            "ProgressDeadlineExceeded" if late and not done else "AsExpected",
            f"{count}; {trouble or 'the events of the pods say why'}"[:MAX_MESSAGE]
            if late and not done
            else "",
        ),
    ]


def _trouble(status: Object) -> str:
    """Why pods cannot be made: quota, pod security, a template that the server refuses."""
    for one in status.get("conditions") or ():
        if one["type"] == "ReplicaFailure" and one["status"] == "True":
            return f"; {one.get('message', '')}"
    return ""


def completeness(service: InferenceService, missing: Sequence[str]) -> list[Verdict]:
    """``ObjectsComplete``: what was asked for and cannot be made in this cluster."""
    asked = {
        "PodMonitor": service.spec.observability.pod_monitor.enabled,
        "PrometheusRule": service.spec.observability.prometheus_rule.enabled,
    }
    lacking = [kind for kind in missing if asked.get(kind)]
    if not lacking:
        return [Verdict(Type.OBJECTS_COMPLETE, True, "AsAskedFor")]
    return [
        Verdict(
            Type.OBJECTS_COMPLETE,
            False,
            "ApiMissing",
            f"the cluster has no {' and no '.join(lacking)}: install the Prometheus operator, or "
            "turn it off in spec.observability; it is looked for again at each resync",
        )
    ]


def troubles(pods: list[Object]) -> str:
    """What keeps the pods' engines from being ready, empty where nothing does."""
    verdict = _container(pods, Type.ENGINE_READY, names.ENGINE, "containerStatuses")
    return verdict.message if verdict.status is False else ""


def containers(pods: list[Object]) -> list[Verdict]:
    """``EngineReady`` and ``SupervisorReady`` by the containers of the pods."""
    return [
        _container(pods, Type.ENGINE_READY, names.ENGINE, "containerStatuses"),
        _container(pods, Type.SUPERVISOR_READY, names.SUPERVISOR, "initContainerStatuses"),
    ]


def _container(pods: list[Object], type_: Type, name: str, field: str) -> Verdict:
    if not pods:
        return Verdict(type_, None, "NoReplicas", "there are no pods")
    troubles = []
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        found = [one for one in (pod.get("status") or {}).get(field) or () if one["name"] == name]
        if not (found and found[0].get("ready")):
            troubles.append(f"{pod['metadata']['name']}: {_why(pod, found)}")
    if not troubles:
        return Verdict(type_, True, "ContainersReady", "")
    return Verdict(type_, False, "ContainersNotReady", "; ".join(troubles)[:MAX_MESSAGE])


def _unscheduled(pod: Object) -> str:
    """The scheduler's sentence, for example about devices that no node has left."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message") or one.get("reason") or "not scheduled")
    return ""


def _why(pod: Object, found: list[Object]) -> str:
    if not found:
        return _unscheduled(pod) or "not started"
    state = found[0].get("state") or {}
    if "waiting" in state:
        waiting = state["waiting"]
        why = waiting.get("reason") or "waiting"
        return f"{why} ({waiting['message']})" if waiting.get("message") else str(why)
    if "terminated" in state:
        return str(state["terminated"].get("reason") or "terminated")
    return "running, not ready" if "running" in state else "not started"


def ends(pods: list[Object]) -> list[Verdict]:
    """``OutOfMemoryKilled`` and ``CrashLooping`` by what containers last ended with."""
    killed, looping = set(), set()
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status") or {}
        for field in ("containerStatuses", "initContainerStatuses"):
            for one in status.get(field) or ():
                states = [one.get("state") or {}, one.get("lastState") or {}]
                if any((s.get("terminated") or {}).get("reason") == "OOMKilled" for s in states):
                    killed.add(name)
                if (states[0].get("waiting") or {}).get("reason") == "CrashLoopBackOff":
                    looping.add(name)
    return [
        Verdict(
            Type.OUT_OF_MEMORY_KILLED,
            bool(killed),
            "KilledForMemory" if killed else "NoKill",
            _pods("the kernel killed a container of", sorted(killed)),
        ),
        Verdict(
            Type.CRASH_LOOPING,
            bool(looping),
            "CrashLoopBackOff" if looping else "NoCrashLoop",
            _pods("containers end again and again in", sorted(looping)),
        ),
    ]


def suspicion(suspect: Suspect | None, course: Course) -> list[Verdict]:
    """``SuspectRevision``; while a roll-out is held or rolled back for it, it is stalled."""
    acts = course.action in ("Held", "RolledBack") and not course.requested
    if suspect is None and not acts:
        return [Verdict(Type.SUSPECT_REVISION, False, "NoSuspect")]
    evidence = (
        f"{suspect.leak} in {suspect.leaking} of {suspect.replicas} replicas of revision "
        f"{suspect.revision} since {suspect.since}"
        if suspect
        else "its leaking replicas are gone by now"
    )
    found = [Verdict(Type.SUSPECT_REVISION, True, "SameLeakInMostReplicas", evidence)]
    if acts:
        text = (
            f"rolled back to revision {course.revision}: {evidence}; change the spec to go on"
            if course.action == "RolledBack"
            else f"the roll-out is held: {evidence}; change the spec, or rollout.onLeak, to go on"
        )
        reason = f"{course.action}ForLeak"
        found.append(Verdict(Type.PROGRESSING, False, reason, text))
        found.append(Verdict(Type.STALLED, True, reason, text))
    return found


def requested(course: Course, complete: bool) -> list[Verdict]:
    """``rollout.revision`` is ``LastGood``: a roll-back that was asked for is no failure.

    ``complete`` says that the revision which is to run does so in all replicas.
    """
    if not course.requested:
        return []
    if course.action == "RolledBack":
        text = f"revision {course.revision} runs, as rollout.revision asks; Spec goes on"
        return [Verdict(Type.PROGRESSING, False, "RolledBackOnRequest", text)] if complete else []
    text = (
        "rollout.revision is LastGood, and before the present revision none was rolled out "
        "completely: the present one runs"
    )
    return [Verdict(Type.STALLED, True, "NoGoodRevision", text)]


def budgets(figures: Mapping[str, Figures]) -> list[Verdict]:
    """``MemoryWithinBudget`` and ``RestartBudgetExhausted`` by the supervisors' figures."""
    spent = sorted(
        pod for pod, one in figures.items() if max(one.host or 0.0, one.device or 0.0) >= 1.0
    )
    known = any(one.host is not None or one.device is not None for one in figures.values())
    exhausted = sorted(pod for pod, one in figures.items() if one.restarts_left == 0)
    counted = any(one.restarts_left is not None for one in figures.values())
    return [
        Verdict(
            Type.MEMORY_WITHIN_BUDGET,
            not spent if known else None,
            ("BudgetSpent" if spent else "WithinBudget") if known else "NoFigures",
            _pods("spent by", spent) if known else "no supervisor reports a budget's use",
        ),
        Verdict(
            Type.RESTART_BUDGET_EXHAUSTED,
            bool(exhausted) if counted else None,
            ("Exhausted" if exhausted else "RestartsLeft") if counted else "NoFigures",
            _pods("no restart is left for", exhausted) if counted else "",
        ),
    ]


def _pods(text: str, pods: list[str]) -> str:
    return f"{text} {', '.join(pods)}"[:MAX_MESSAGE] if pods else ""
