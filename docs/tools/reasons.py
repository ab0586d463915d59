"""The page of reasons for which a service or a policy is not well, from the reasons in the code.

Each reason that the operator can give is either explained in :data:`WHAT` or one of :data:`FINE`;
:func:`page` raises ValueError for one that is in neither, and for one that nothing gives any more.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.tools.blocks import ROOT
from plimsoll_api.state import SignalReason

OPERATOR = ROOT / "operator" / "plimsoll_operator"
PLACES = {"ConditionState": 2, "Failure": 0, "Cause": 0}
"""What has a reason -> which of its arguments that is."""
COMPOSED = frozenset({"HeldForLeak", "RolledBackForLeak"})
"""Made of the rollout's decision and a suffix."""
_WORD = re.compile(r"[A-Z][a-z]+[A-Za-z]*|API[A-Za-z]+|OOM[A-Za-z]+|No[A-Z][A-Za-z]*")

FINE = frozenset(
    {
        "AllObjectsCreated", "AllSignals", "AsExpected", "BelowLimit", "ContainersReady",
        "NoConflict", "NoCrashLoop", "NoLeak", "NoOOMKill", "NoSlowLeak", "NoSuspect", "PodsStart",
        "ReplicasReady", "RolledBackOnRequest", "RolloutComplete", "ScaledToZero", "Supervised",
        "WithinBudget",
    }
)  # fmt: skip
"""Reasons of a condition that needs nobody."""

WHAT: dict[str, tuple[str, str]] = {
    "APINotInstalled": (
        "The service asks for an object whose kind the cluster does not have. As the reason of"
        " `Ready`, it is a LeaderWorkerSet, and nothing was changed.",
        "Install the controller that the message names, or remove the field that asks for it.",
    ),
    "ApplyFailed": (
        "The API server refused an object, or did not answer. The message has its words.",
        "Correct what the message names: a quota, an admission rule, a permission of the operator."
        " The operator tries again by itself.",
    ),
    "BudgetExhausted": (
        "`MemoryWithinBudget`: a replica has spent its leak budget. `RestartBudgetExhausted`: its"
        " supervisor restarts nothing any more.",
        "Read `plimsoll incidents`. When the cause is gone, run `plimsoll resume POD`: see the"
        " runbook of `PlimsollRestartBudgetExhausted`.",
    ),
    "ContainerExited": (
        "A container ended. The message has its exit code and the last lines of its log.",
        "Correct what the log names.",
    ),
    "ContainersNotReady": (
        "The engine still starts and nothing says that it will not become ready.",
        "Wait, at most `engine.startupTimeout`. Then read the log of the engine.",
    ),
    "CrashLoopBackOff": (
        "A container ended at least twice, and Kubernetes waits before it starts it again.",
        "Read the log of its last run: `kubectl logs POD -c CONTAINER --previous`.",
    ),
    "DeviceUnhealthy": (
        "The kubelet reports a device of the pod as unhealthy, and the pod is not ready.",
        "Look for the device's error on the node, and delete the pod for one with other devices.",
    ),
    "FailedCreate": (
        "Kubernetes cannot create a pod, for example because of a quota or pod security.",
        "The message has the refusal. Change the service or the namespace accordingly.",
    ),
    "FieldsNotKept": (
        "The cluster dropped fields that the operator applied. The message names them.",
        "Look for the admission webhook that removes them, or a feature that the cluster lacks.",
    ),
    "HeldForLeak": (
        "The rollout waits, because most replicas of the new revision leak alike.",
        "Change the spec, or set `rollout.onLeak`.",
    ),
    "ImagePullBackOff": (
        "The node cannot pull an image. The message has the registry's answer.",
        "Correct the image's name, or add a Secret for its registry.",
    ),
    "InsufficientData": (
        "No supervisor has watched its engine for long enough to tell slow growth from noise.",
        "Wait. It takes about nine hours.",
    ),
    "InvalidSpec": (
        "The spec does not mean anything to this release, for example after an upgrade.",
        "Change the field that the message names.",
    ),
    "MemoryKeepsGrowing": (
        "Memory grows within its budget and does not stop.",
        "The message has the time until the limit. Follow the runbook of `PlimsollSlowLeak`.",
    ),
    "NameConflict": (
        "An object of the name that the service needs exists and belongs to someone else.",
        "Rename one of the two. If it belongs to a deleted service of the same name, wait.",
    ),
    "NearLimit": (
        "More than 95 % of the memory limit is in use and cannot be reclaimed.",
        "Follow the runbook of `PlimsollMemoryNearLimit`.",
    ),
    "NoGoodRevision": (
        "`rollout.revision` is `LastGood`, and no earlier revision is known to be good.",
        "Set `rollout.revision` to `Spec`.",
    ),
    "NoMetrics": (
        "No supervisor has reported yet, or the operator cannot reach them.",
        "Wait for a minute, then run `plimsoll doctor`.",
    ),
    "NoPodSupervised": (
        "The policy selects pods, and none has a supervisor that sees its engine.",
        "The message counts them by cause. Restart the workload of pods that wait for it.",
    ),
    "NoPods": (
        "The policy is ready, but no pod matches its selector.",
        "Compare the selector with the labels of the pods, and their namespace.",
    ),
    "NoReplicas": ("There is no pod yet.", "Look at `Progressing`."),
    "NotReady": (
        "A container runs and does not answer its readiness probe yet.",
        "Wait. If it lasts, read its log.",
    ),
    "NotStarted": (
        "The kubelet has not started the container yet.",
        "Wait. If it lasts, look at the pod's Events.",
    ),
    "OOMKilled": (
        "The kernel killed a container, because it was at its memory limit.",
        "Raise the limit, or find what grows: `plimsoll incidents`.",
    ),
    "PartlySupervised": (
        "Some of the policy's pods have no supervisor yet.",
        "Restart their workload, or set `spec.rollout` to `Restart`.",
    ),
    "PodDoesNotStart": (
        "A pod does not start with its supervisor. New pods still get one.",
        "The message names the container and the error, for example an image that is missing.",
    ),
    "PodLeftOver": (
        "A worker is older than the leader of its group, and blocks the name of the new worker.",
        "Delete the pods that the message names. If it recurs, restart kube-controller-manager.",
    ),
    "PodsDoNotStart": (
        "Several pods could not start with their supervisors, so new pods get none.",
        "Follow the runbook of `PlimsollInjectionStopped`.",
    ),
    "PodsRefused": (
        "The API server refuses pods because of their supervisor, so new pods get none.",
        "Follow the runbook of `PlimsollInjectionStopped`.",
    ),
    "PodsSelectedTwice": (
        "Another policy selects the same pods. The older policy supervises them.",
        "Narrow one of the selectors.",
    ),
    "ProgressDeadlineExceeded": (
        "The rollout takes longer than the engine may need to start.",
        "The message has the first cause. Correct it, or raise `engine.startupTimeout`.",
    ),
    "ReplicasDrained": (
        "Someone drained replicas, and too few are left.",
        "Run `plimsoll resume POD` for those that the message names.",
    ),
    "ReplicasNotReady": (
        "The rollout is complete, and too few replicas are ready.",
        "Look at `EngineReady` and `SupervisorReady`.",
    ),
    "ResourceClaimMissing": (
        "The pod is not scheduled, because a device claim of it does not exist.",
        "Create the ResourceClaimTemplate or ResourceClaim that the message names.",
    ),
    "RolledBackForLeak": (
        "The service runs its last good revision, because most replicas of the new one leak alike.",
        "Change the spec.",
    ),
    "RollingOut": ("A rollout is under way.", "Wait."),
    "ObservationIncomplete": (
        "`LeakFree` is not decided yet. The message says what is missing.",
        "Wait for the `minutesLeft` in `status`, under load. See"
        " [other controllers](integrations.md#verdict-on-a-revision).",
    ),
    "SameLeakInMostReplicas": (
        "Most replicas of one revision have the same leak, and the others do not.",
        "Follow the runbook of `PlimsollSuspectRevision`.",
    ),
    "TooManyPods": (
        "A workload has so many pods that some can take no restart slot.",
        "Use more policies.",
    ),
    "TooManyServiceAccounts": (
        "The policy's pods have more ServiceAccounts than can get permissions.",
        "Use fewer accounts, or more policies.",
    ),
    "TooManyWorkloads": (
        "The policy's pods belong to more workloads than can have restart slots.",
        "Use more policies.",
    ),
    "Unproven": (
        "No pod has run with this supervisor image yet, so few pods at once get one.",
        "Wait until the first pods are ready.",
    ),
    "EngineNotFound": (
        "The supervisor finds no process of the engine.",
        "Follow the runbook of `PlimsollSupervisorBlind`.",
    ),
    "EngineSilent": (
        "The engine runs and does not answer.",
        "Wait while it starts. Otherwise look at its log, and for a `Stall` incident.",
    ),
    "HostMemoryUnreadable": (
        "The supervisor may not read the memory of the engine's processes.",
        "Set `runAsUser` of the pod: the supervisor then runs as the engine's user.",
    ),
    "DeviceMemoryUnreadable": (
        "Neither NVML nor an exporter tells how much device memory is in use.",
        "Name the node's exporter, or ignore the device budget.",
    ),
    "ScaledObjectNotReady": (
        "KEDA cannot use the triggers of `spec.autoscaling`. The message has its words, as of the"
        " operator's last resync.",
        "Read `kubectl describe scaledobject NAME`, and correct the trigger or what it asks.",
    ),
    "SharedMemoryUnreadable": (
        "The files in `/dev/shm`, or the processes that use them, cannot be read.",
        "Set `runAsUser` of the pod: the supervisor then runs as the engine's user.",
    ),
    "MetricsSilent": (
        "The engine's metrics page does not answer.",
        "Look at the engine's log.",
    ),
    "MetricsMissing": (
        "The engine has no metrics page.",
        "Turn it on: SGLang needs `--enable-metrics`.",
    ),
    "MetricsUnauthorized": (
        "The engine's metrics page needs a key.",
        "Serve the page without one on the pod's loopback.",
    ),
    "MetricsUnknownNames": (
        "The page has none of the metrics that the engine's type has.",
        "Follow the runbook of `PlimsollEngineMetricsUnusable`.",
    ),
    "MetricsIncomplete": (
        "The page lacks some of the metrics that stalls are judged by.",
        "Check the engine's version against the conformance table.",
    ),
    "MetricsInconsistent": (
        "Metrics contradict each other, as those of several processes in turn do.",
        "Let the engine write one page for all of its processes.",
    ),
}
"""Reason -> what it means, and what to do."""
HEAD = """# My service or policy is not ready

<!-- Generated by python -m docs.generate -->

`kubectl get plinf` and `kubectl get plsp` show the reason of the condition `Ready`, and
`kubectl describe` shows all conditions with their messages. A message names the pod, the container
or the field. This page lists each reason that the operator gives and that may need you. If a pod
cannot start, `Ready` and `EngineReady` have the reason that Kubernetes gives. One of them is
`ImagePullBackOff`. With `Unschedulable`, the message quotes the scheduler: add a claim, a GPU or
memory, or ask for less. With `FailedMount` and `FailedAttachVolume`, create the Secret, ConfigMap
or claim that the message names. `plimsoll doctor` checks the installation.

| Reason | What it means | What to do |
|---|---|---|
"""


def page() -> str:
    """Return the page. ValueError names reasons that :data:`WHAT` lacks or need not have."""
    given = {*reasons(), *COMPOSED, *(one.value for one in SignalReason)}
    if lacking := given - set(WHAT) - FINE:
        raise ValueError(f"docs/tools/reasons.py: explain {', '.join(sorted(lacking))}")
    if surplus := (set(WHAT) | FINE) - given:
        raise ValueError(f"docs/tools/reasons.py: nothing gives {', '.join(sorted(surplus))}")
    rows = (f"| `{name}` | {what} | {do} |\n" for name, (what, do) in sorted(WHAT.items()))
    return HEAD + "".join(rows)


def reasons() -> set[str]:
    """Return all reasons that the operator's code names."""
    found: set[str] = set()
    for path in sorted(OPERATOR.rglob("*.py")):
        found |= set(_in(path))
    return found


def _in(path: Path) -> Iterator[str]:
    """Yield the reasons in one file, also those that a variable holds first."""
    tree = ast.parse(path.read_text())
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in _pairs(target, node.value):
                    values.setdefault(name, []).append(value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = PLACES.get(node.func.id)
            if place is not None and len(node.args) > place:
                yield from _words(node.args[place], values, set())


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, held in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, held)


def _words(node: ast.expr, values: dict[str, list[ast.expr]], seen: set[str]) -> Iterator[str]:
    """Yield the words that an expression may be; of a choice, not what decides it."""
    if isinstance(node, ast.IfExp):
        yield from _words(node.body, values, seen)
        yield from _words(node.orelse, values, seen)
    elif isinstance(node, ast.BoolOp):
        for one in node.values:
            yield from _words(one, values, seen)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        for one in node.args:
            yield from _words(one, values, seen)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if _WORD.fullmatch(node.value):
            yield node.value
    elif isinstance(node, ast.Name) and node.id not in seen:
        for held in values.get(node.id, ()):
            yield from _words(held, values, seen | {node.id})
