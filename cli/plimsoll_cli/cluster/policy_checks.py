"""What ``plimsoll doctor`` checks of SupervisionPolicies: status, pods without a supervisor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from plimsoll_api.names import POLICY_PLURAL, REFUSED
from plimsoll_api.workloads import membership
from plimsoll_cli.cluster.check import Check
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.cluster.supervised import of_policy, supervised
from plimsoll_cli.errors import RunError

MAX_NAMED = 4
"""Workloads that one line names."""
ROLLED_OUT = ("Deployment", "StatefulSet", "DaemonSet")
"""What ``kubectl rollout restart`` takes."""


def policies(cluster: Cluster, name: str | None) -> list[Object]:
    """List the policy of that name, or all; raise RunError if there is none of that name."""
    if name is None:
        return list(cluster.pages(POLICY_PLURAL))
    found = cluster.named(POLICY_PLURAL, name)
    if found is None:
        raise RunError(
            f"not in namespace {cluster.namespace or 'default'}: check the name and -n; see:"
            " plimsoll top -A"
        )
    return [found]


def checks(cluster: Cluster, policy: Object) -> Iterator[Check]:
    """Check the status of ``policy``, and say what to do about its pods."""
    name = f"policy {policy['metadata']['name']}"
    yield from of_status(policy)
    try:
        pods = of_policy(cluster, policy)
    except RunError as error:
        yield Check(name, None, str(error).splitlines()[0])
        return
    waiting = [one for one in pods if not supervised(one) and not _refusal(one) and not _over(one)]
    if waiting:
        yield Check(f"{name} waiting", False, f"recreate {_by_workload(waiting)}")


def of_status(policy: Object) -> Iterator[Check]:
    """Conditions, counts and refusals, as the operator wrote them."""
    meta, status = policy["metadata"], policy.get("status") or {}
    name = f"policy {meta['name']}"
    found = {one["type"]: one for one in status.get("conditions") or ()}
    ready = found.get("Ready")
    if ready is None or status.get("observedGeneration") != meta.get("generation"):
        text = "the operator has not read this version of it: check that the operator runs"
        yield Check(name, None, text)
        return
    supervised_all = status.get("supervised") == status.get("selected") != 0
    is_ready = ready.get("status") == "True"
    text = f"{ready.get('reason')}: {ready.get('message')}"
    if is_ready and status.get("selected") == 0:
        text += ": compare spec.selector with the labels of the pods"
    yield Check(name, is_ready and supervised_all, text)
    for one in status.get("refusals") or ():
        yield Check(f"{name} refused", False, f"pod {one['pod']}: {one['reason']}")
    conflict = found.get("Conflicting") or {}
    if conflict.get("status") == "True":
        text = f"{conflict.get('message')}: narrow one of the selectors"
        yield Check(f"{name} conflict", False, text)


def _by_workload(pods: Sequence[Object]) -> str:
    """Group the pods by what recreates them, with the command for it."""
    held = defaultdict(list)
    for pod in pods:
        held[membership(pod["metadata"]).workload].append(str(pod["metadata"]["name"]))
    parts = []
    for workload, names in held.items():
        shown = ", ".join(sorted(names)[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        if workload is None:
            parts.append(f"{shown} (nothing recreates these pods)")
        elif workload.kind in ROLLED_OUT:
            command = f"kubectl rollout restart {workload.kind.lower()}/{workload.name}"
            parts.append(f"{shown}: {command}")
        else:
            parts.append(f"{shown} of {workload.kind} {workload.name}")
    more = len(parts) - MAX_NAMED
    return "; ".join(parts[:MAX_NAMED]) + (f"; and {more} more workloads" if more > 0 else "")


def _refusal(pod: Object) -> bool:
    return REFUSED in (pod["metadata"].get("annotations") or {})


def _over(pod: Object) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return bool(pod["metadata"].get("deletionTimestamp")) or phase in ("Succeeded", "Failed")
