"""Status and decisions, from observed objects alone.

Tests ``status/service.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_api.supervision_policy_status import PolicyCondition
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.supervisor_metrics import (
    SupervisorMetrics,
    compute_rounded_percent,
    make_memory_status,
)
from plimsoll_operator.fleet.supervisor_metrics import parse_metrics_page as parse_metrics_page
from plimsoll_operator.kinds import InvalidSpecError, Key, make_ref
from plimsoll_operator.plans.service import Failure, make_plan, parse_service
from plimsoll_operator.render import Images
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.conditions import (
    NOT_READY_REASON,
    ConditionState,
    make_engine_observed_condition,
    make_metric_conditions,
    make_rollout_conditions,
)
from plimsoll_operator.status.service import make_status
from tests.missing import lacks

ARGOCD = Path(__file__).parents[3] / "examples" / "argocd" / "health.yaml"
IMAGES = Images("engine:1", "supervisor:1")
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def item(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 2},
        "spec": {"model": {"uri": "file:///m"}} | spec,
    }


def deployment(ready: int, updated: int, replicas: int, *conditions: Any) -> dict[str, Any]:
    return {
        "kind": "Deployment",
        "metadata": {"name": "qwen", "generation": 4},
        "status": {
            "observedGeneration": 4,
            "replicas": replicas,
            "readyReplicas": ready,
            "updatedReplicas": updated,
            "conditions": list(conditions),
        },
    }


LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
REFUSED = {"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}


@pytest.mark.parametrize(
    ("found", "wanted", "ready", "progressing", "stalled"),
    [
        (None, 1, False, True, False),
        (deployment(1, 1, 1), 1, True, False, False),
        (deployment(2, 3, 3), 3, True, True, False),
        (deployment(1, 3, 3), 3, False, True, False),
        (deployment(3, 1, 4), 3, True, True, False),
        (deployment(1, 1, 4), 3, False, True, False),
        (deployment(2, 1, 3, LATE), 3, True, False, True),
        (deployment(0, 0, 0), 0, True, False, False),
        (deployment(0, 1, 1, LATE), 1, False, False, True),
    ],
)
def test_rollout(found: Any, wanted: int, ready: bool, progressing: bool, stalled: bool) -> None:
    verdicts = {one.type: one.status for one in make_rollout_conditions(found, wanted, 1)}
    assert verdicts == {"Ready": ready, "Progressing": progressing, "Stalled": stalled}


def test_why_pods_cannot_be_made_is_said() -> None:
    assert (
        "violates PodSecurity"
        in make_rollout_conditions(deployment(0, 0, 0, REFUSED), 1, 1)[0].message
    )


def test_ready_names_the_first_cause() -> None:
    none = deployment(0, 1, 1)
    pulls = ConditionState(
        ConditionType.ENGINE_READY, False, "ImagePullBackOff", "a-0: no such image"
    )
    ready = make_rollout_conditions(none, 1, 1, pulls)[0]
    assert (ready.status, ready.reason) == (False, "ImagePullBackOff")
    assert ready.message == "0 of 1 replicas are ready; a-0: no such image"
    waits = ConditionState(
        ConditionType.ENGINE_READY,
        False,
        NOT_READY_REASON,
        "a-0: the container is running but not ready",
    )
    ready = make_rollout_conditions(none, 1, 1, waits)[0]
    assert ready.reason == "ReplicasNotReady"
    assert ready.message.endswith("a-0: the container is running but not ready")
    fine = make_rollout_conditions(deployment(1, 1, 1), 1, 1, pulls)[0]
    assert fine.reason == "ReplicasReady"


def test_a_roll_out_names_the_new_pod_that_waits_for_what_an_old_one_holds() -> None:
    holds = ConditionState(
        ConditionType.ENGINE_READY, False, "Unschedulable", "b-1: cannot allocate"
    )
    ready, progressing, _ = make_rollout_conditions(deployment(1, 2, 1), 1, 0, holds)
    assert ready.status is True
    assert progressing.message == "1 of 1 replicas are ready; b-1: cannot allocate"
    waits = ConditionState(
        ConditionType.ENGINE_READY,
        False,
        NOT_READY_REASON,
        "b-1: the container is running but not ready",
    )
    assert (
        make_rollout_conditions(deployment(1, 2, 1), 1, 0, waits)[1].message
        == "1 of 1 replicas are ready"
    )


def test_a_deployment_that_was_not_looked_at_yet_progresses_and_serves_on() -> None:
    old = deployment(1, 1, 1, LATE)
    old["metadata"]["generation"] = 5
    found = {one.type: one.status for one in make_rollout_conditions(old, 1, 1)}
    assert found == {"Ready": True, "Progressing": True, "Stalled": False}


def kstatus(service: dict[str, Any], found: dict[str, Any]) -> str:
    """What kstatus makes of a custom resource, by its documented rules."""
    conditions = {one["type"]: one["status"] for one in found["conditions"]}
    if found["observedGeneration"] != service["metadata"]["generation"]:
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions["Ready"] == "True" else "InProgress"


ROLLOUTS = [
    (deployment(3, 3, 3), "True", "Current"),
    (deployment(3, 1, 4), "True", "InProgress"),
    (deployment(2, 3, 3), "True", "InProgress"),
    (deployment(2, 1, 3, LATE), "True", "Failed"),
    (None, "False", "InProgress"),
]


@pytest.mark.parametrize(("found", "ready", "said"), ROLLOUTS)
def test_tools_wait_for_the_end_of_a_roll_out_that_serves(
    found: Any, ready: str, said: str
) -> None:
    service = item(replicas=3)
    after = make_status(service, parse_service(service), found, [], [], {}, None, NOW)
    conditions = {one["type"]: one for one in after["conditions"]}
    assert conditions["Ready"]["status"] == ready
    assert kstatus(service, after) == said
    assert after["desiredReplicas"] == 3
    progressing = conditions["Progressing"]
    assert conditions["Reconciling"]["status"] == progressing["status"]


def argocd(service: dict[str, Any], after: dict[str, Any]) -> str:
    """The health that Argo CD's check has, as its interpreter runs it: ``obj`` is the object."""
    lua = shutil.which("lua5.4")
    if lua is None:
        lacks("lua5.4 is missing: apt-get install lua5.4")
    checks = yaml.safe_load(ARGOCD.read_text())["data"]
    check = checks[f"resource.customizations.health.plimsoll.dev_{service['kind']}"]
    program = f"local obj = {table(service | {'status': after})}\n"
    program += f"local function check()\n{check}\nend\nlocal health = check()\n"
    program += "print(health.status)\nprint(health.message)\n"
    done = subprocess.run([lua, "-"], input=program, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    word, message = done.stdout.splitlines()
    assert message, "a person reads why"
    return word


def table(value: Any) -> str:
    """``value``, which JSON could hold, as Lua writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(k)}] = {table(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(table, value)) + "}"
    return "nil" if value is None else json.dumps(value)


@pytest.mark.parametrize(("found", "ready", "said"), ROLLOUTS)
def test_argo_cd_waits_as_kstatus_does(found: Any, ready: str, said: str) -> None:
    service = item(replicas=3)
    after = make_status(service, parse_service(service), found, [], [], {}, None, NOW)
    words = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}
    assert argocd(service, after) == words[said]
    service["metadata"]["generation"] += 1
    assert argocd(service, after) == "Progressing", "the status is of the spec before"


@pytest.mark.parametrize(
    ("ready", "word"),
    [
        ({"status": "True", "reason": "Supervised"}, "Healthy"),
        ({"status": "False", "reason": "NoPodSupervised"}, "Suspended"),
        ({"status": "False", "reason": "NameConflict"}, "Degraded"),
    ],
)
def test_argo_cd_sees_a_policy(ready: dict[str, str], word: str) -> None:
    policy = {"kind": "SupervisionPolicy", "metadata": {"generation": 1}}
    after = {"observedGeneration": 1, "conditions": [ready | {"type": "Ready", "message": "m"}]}
    assert argocd(policy, after) == word
    assert argocd(policy, {}) == "Progressing"


def build(service: dict[str, Any], metrics: Any, failure: Any = None, now: str = NOW) -> Any:
    return make_status(
        service, parse_service(service), deployment(1, 1, 1), [], [], metrics, failure, now
    )


def test_the_same_observation_gives_the_same_status() -> None:
    service = item()
    service["status"] = build(service, {})
    assert build(service, {}, now=LATER) == service["status"]


def test_a_time_moves_only_with_its_status() -> None:
    service = item()
    service["status"] = build(service, {"p": SupervisorMetrics(host=0.2)})
    after = build(service, {"p": SupervisorMetrics(host=1.0)}, now=LATER)
    times = {one["type"]: one["lastTransitionTime"] for one in after["conditions"]}
    assert times["MemoryWithinBudget"] == LATER
    assert times["Ready"] == NOW


def test_a_condition_that_has_another_name_now_goes() -> None:
    service = item()
    old = {"type": "OutOfMemoryKilled", "status": "True", "reason": "KilledForMemory"}
    service["status"] = {"conditions": [old | {"lastTransitionTime": NOW, "message": ""}]}
    types = {one["type"] for one in build(service, None)["conditions"]}
    assert "OOMKilled" in types
    assert "OutOfMemoryKilled" not in types


def test_figures_stay_until_the_next_scrape() -> None:
    service = item()
    service["status"] = build(service, {"p": SupervisorMetrics(host=0.5)})
    assert build(service, None, now=LATER) == service["status"]
    assert "memory" not in build(service, {}, now=LATER), "asked, and unknown: absent"


def test_figures_are_unknown_from_the_beginning() -> None:
    """And the first answer without any figure changes nothing: no write for each new service."""
    service = item()
    service["status"] = build(service, None)
    unknown = {one["type"] for one in service["status"]["conditions"] if one["status"] == "Unknown"}
    assert unknown >= {"MemoryWithinBudget", "RestartBudgetExhausted"}
    assert build(service, {}, now=LATER) == service["status"]


def test_an_invalid_spec_is_stalled_and_keeps_what_was_known() -> None:
    service = item()
    service["status"] = build(service, {})
    failure = Failure("InvalidSpec", "spec.model.uri: no", is_lasting=True)
    found = make_status(service, None, deployment(1, 1, 1), [], [], None, failure, LATER)
    conditions = {one["type"]: one for one in found["conditions"]}
    assert conditions["Ready"]["reason"] == "InvalidSpec"
    assert conditions["Stalled"]["status"] == "True"
    assert found["url"] == "http://qwen.ml.svc"


@pytest.mark.parametrize(
    "template", [{"spec": "x"}, {"spec": {"containers": ["x"]}}, {"metadata": 1}]
)
def test_a_pod_template_that_is_none_is_an_invalid_spec(template: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.podTemplate"):
        make_plan(parse_service(item(podTemplate=template)), {}, [], [], IMAGES)


def test_what_is_not_wanted_goes_unless_it_is_somebody_elses_or_held() -> None:
    service = parse_service(item(supervision={"maxUnavailable": 3}))
    owned = {make_ref(one): one for one in make_plan(service, {}, [], [], IMAGES).desired}
    names = {where.name: where for where in owned}
    owned[names["qwen-restart-2"]]["spec"] = {"holderIdentity": "pod-1"}
    owned[names["qwen-restart-1"]]["spec"] = {"holderIdentity": "gone"}
    foreign = {"kind": "Lease", "metadata": {"name": "other", "ownerReferences": []}}
    owned[make_ref(foreign)] = foreign
    pods = [PodView.parse({"metadata": {"name": "pod-1"}})]
    fewer = parse_service(item(supervision={"maxUnavailable": 1}))
    surplus = make_plan(fewer, owned, pods, [], IMAGES).surplus
    assert [one["metadata"]["name"] for one in surplus] == ["qwen-restart-1"]


def test_figures_from_a_metrics_page() -> None:
    text = (
        b"# HELP plimsoll_memory_budget_consumed_ratio x\n"
        b'plimsoll_memory_budget_consumed_ratio{kind="host"} 0.36\n'
        b'plimsoll_memory_budget_consumed_ratio{kind="device"} NaN\n'
        b"plimsoll_restart_budget_remaining 2.0\nbroken line here\n"
    )
    assert parse_metrics_page(text) == SupervisorMetrics(host=0.36, device=None, restarts_left=2)
    assert parse_metrics_page(b"") == SupervisorMetrics()


def test_percent_moves_in_steps_and_reaches_a_hundred_only_when_spent() -> None:
    assert [compute_rounded_percent(value) for value in (0.0, 0.049, 0.05, 0.999, 1.0, 1.32)] == [
        0, 0, 5, 95, 100, 130,
    ]  # fmt: skip


def test_the_worst_replica_is_shown_for_each_kind() -> None:
    metrics = {
        "a": SupervisorMetrics(host=0.5),
        "b": SupervisorMetrics(host=0.2, device=0.9),
        "c": SupervisorMetrics(),
    }
    assert make_memory_status(metrics) == {
        "hostConsumedPercent": 50,
        "deviceConsumedPercent": 90,
        "replica": "b",
    }
    assert make_memory_status({"c": SupervisorMetrics()}) == {}


def test_a_status_moves_at_most_once_a_minute_but_the_first_figure_comes_at_once() -> None:
    time, key = [0.0], Key("ml", "qwen")
    changed: list[float] = []
    scraper = Scraper(Store(), lambda _: changed.append(time[0]), clock=lambda: time[0])
    for second in range(0, 300, 5):
        time[0] = float(second)
        metrics = {"p": SupervisorMetrics(host=second / 100)} if second >= 10 else {}
        scraper.publish(key, metrics)
    assert changed == [0.0, 10.0, 70.0, 130.0, 190.0, 250.0]


def test_memory_that_stands_flat_near_its_limit_is_said_and_does_not_flap() -> None:
    """97 % of the limit from the start on had a metric and an alert, and no word in a status."""

    def near(metrics: dict[str, SupervisorMetrics], status: str = "False") -> ConditionState:
        before = {"conditions": [{"type": "MemoryNearLimit", "status": status}]}
        for types in (ConditionType, PolicyCondition):
            found = {one.type: one for one in make_metric_conditions(metrics, before, types)}
            verdict = found[types.MEMORY_NEAR_LIMIT]
        return verdict

    assert near({}).status is None
    assert near({"a": SupervisorMetrics()}).reason == "NoMetrics"
    assert near({"a": SupervisorMetrics(limit=0.94)}).status is False
    full = near({"a": SupervisorMetrics(limit=0.97), "b": SupervisorMetrics(limit=0.5)})
    assert (full.status, full.reason) == (True, "NearLimit")
    assert full.message.endswith("cannot be reclaimed in a")
    assert near({"a": SupervisorMetrics(limit=0.94)}, "True") == full, "it moved around the share"
    assert near({"a": SupervisorMetrics(limit=0.91)}, "True").status is False


def test_what_supervisors_do_not_see_has_their_own_word() -> None:
    def seen(**unseen: tuple[tuple[str, str], ...] | None) -> ConditionState:
        return make_engine_observed_condition(
            ConditionType.ENGINE_OBSERVED,
            {pod: SupervisorMetrics(missing_signals=one) for pod, one in unseen.items()},
        )

    assert (seen().status, seen(a=None).reason) == (None, "NoMetrics")
    assert seen(a=(), b=None).status is True
    key = (("metrics", "MetricsUnauthorized"),)
    lost = seen(a=key, b=(("engine", "EngineSilent"), ("host", "HostMemoryUnreadable")))
    assert (lost.status, lost.reason) == (False, "EngineSilent")
    assert lost.message.startswith(
        "b: EngineSilent, HostMemoryUnreadable; a: MetricsUnauthorized"
        " (to see details, run plimsoll doctor)"
    )
