"""``status`` of a SupervisionPolicy as a whole, ready to be applied on the subresource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll_api.incidents import ENDED
from plimsoll_api.supervision_policy_status import MAX_REFUSED_PODS, PolicyCondition
from plimsoll_operator.kinds import Object
from plimsoll_operator.policies.selected_pod import SelectedPod, State
from plimsoll_operator.policies.workloads import MAX_WORKLOADS, Workload
from plimsoll_operator.status.conditions import MAX_MESSAGE, Failure, Verdict
from plimsoll_operator.status.figures import Figures, memory
from plimsoll_operator.status.service_status import merged

MAX_NAMED = 4
"""Pods and policies that a message names."""


def status(
    item: Object,
    pods: Sequence[SelectedPod] | None,
    incidents: Sequence[Object],
    figures: Mapping[str, Figures] | None,
    failure: Failure | None,
    now: str,
) -> Object:
    """The status that ``item`` should have.

    ``pods`` is None where the spec is invalid: what the last status says of pods stays.
    ``figures`` is None until the supervisors were asked for the first time. ``now`` is RFC 3339.
    """
    before: Object = item.get("status") or {}
    generation = item["metadata"].get("generation", 0)
    counted = ("selected", "supervised", "waitingForRestart", "refused", "refusals")
    after: Object = {"observedGeneration": generation}
    if pods is None:
        after |= {key: before[key] for key in counted if key in before}
        after |= {"openIncidents": before.get("openIncidents", 0)}
    else:
        after |= _counts(pods) | {"openIncidents": _open(pods, incidents)}
    verdicts = [_ready(after, failure)]
    if pods is not None:
        verdicts.append(_conflicting(pods))
    elif not before.get("conditions"):
        text = "an invalid spec selects no pod"
        verdicts.append(Verdict(PolicyCondition.CONFLICTING, None, "InvalidSpec", text))
    after["conditions"] = merged(before, verdicts, generation, now)
    shown = before.get("memory") if figures is None else memory(figures)
    return after | ({"memory": shown} if shown else {})


def too_many_workloads(workloads: Sequence[Workload], chosen: Sequence[Workload]) -> Failure | None:
    """Why supervisors of some pods find no restart slot. ``chosen`` are those that have slots."""
    have = {one.ref for one in chosen}
    without = [one for one in workloads if one.needs_slots and one.ref not in have]
    if without:
        text = (
            f"the pods belong to {len(without) + len(chosen)} workloads, and {MAX_WORKLOADS} can"
            f" have restart slots: {_named([str(one.ref) for one in without])} restart nothing; use"
            " more policies"
        )
        return Failure("TooManyWorkloads", text, lasting=True)
    large = [str(one.ref or "pods without an owner") for one in chosen if one.too_many]
    if large:
        text = (
            f"{_named(large)}: so many pods that some can take no restart slot: use more policies"
        )
        return Failure("TooManyPods", text, lasting=True)
    return None


def _counts(pods: Sequence[SelectedPod]) -> Object:
    there = [one for one in pods if one.state is not State.LEAVING]
    refused = sorted((one for one in there if one.state is State.REFUSED), key=lambda one: one.name)
    found: Object = {
        "selected": len(there),
        "supervised": sum(one.state is State.SUPERVISED for one in there),
        "waitingForRestart": sum(one.state is State.WAITING for one in there),
        "refused": len(refused),
    }
    if refused:
        shown = refused[:MAX_REFUSED_PODS]
        found["refusals"] = [{"pod": one.name, "reason": one.reason} for one in shown]
    return found


def _open(pods: Sequence[SelectedPod], incidents: Sequence[Object]) -> int:
    """Incidents that go on. One counts only for a pod that the policy supervises: whoever has the
    account of such a pod may write one in the policy's name."""
    supervised = {one.name for one in pods if one.state is State.SUPERVISED}
    return sum(
        one["spec"]["pod"] in supervised and (one.get("status") or {}).get("phase") not in ENDED
        for one in incidents
    )


def _ready(counts: Object, failure: Failure | None) -> Verdict:
    kind = PolicyCondition.READY
    if failure is not None:
        return Verdict(kind, False, failure.reason, failure.message[:MAX_MESSAGE])
    if not counts["selected"]:
        return Verdict(kind, True, "NoPods", "no pod matches the selector")
    text = f"{counts['supervised']} of {counts['selected']} selected pods are supervised"
    if counts["waitingForRestart"]:
        text += f"; not supervised until recreated: {counts['waitingForRestart']}"
    if counts["refused"]:
        text += f"; refused: {counts['refused']} (see status.refusals)"
    complete = counts["supervised"] == counts["selected"]
    return Verdict(kind, True, "Supervised" if complete else "PartlySupervised", text)


def _conflicting(pods: Sequence[SelectedPod]) -> Verdict:
    kind = PolicyCondition.CONFLICTING
    shared = [one for one in pods if one.others and one.state is not State.LEAVING]
    if not shared:
        return Verdict(kind, False, "NoConflict", "no other policy selects a pod of this policy")
    parts = []
    for mine, word in ((True, "this policy, which is older, supervises"), (False, "")):
        some = sorted((one for one in shared if one.mine is mine), key=lambda one: one.name)
        if not some:
            continue
        policies = sorted({name for one in some for name in one.others})
        text = f"{_named(policies)} also selects {_named([one.name for one in some])}: "
        parts.append(text + (f"{word} them" if mine else "the oldest policy supervises them"))
    return Verdict(kind, True, "PodsSelectedTwice", "; ".join(parts)[:MAX_MESSAGE])


def _named(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
