"""Incidents of a service or policy that is gone: marked, kept for a week, then deleted."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from plimsoll_operator.config import Config
from plimsoll_operator.controllers.pods import (
    DELETION_FIELD_MANAGER,
    OWNER_DELETED_ANNOTATION,
    Evictions,
    delete_expired_incidents,
    reconcile_pods,
)
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.kinds import Key, Kind, Object
from plimsoll_operator.render import Images
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError
from tests import fake_api
from tests.fake_api import Answer, FakeApi

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions

KEY = Key("ml", "engines", "SupervisionPolicy")
CONFIG = Config(images=Images("engine:1", "supervisor:1"))
WEEK_S = CONFIG.intervals.orphans


def incident(gone_at: str | None = None) -> Object:
    marks = {} if gone_at is None else {"annotations": {OWNER_DELETED_ANNOTATION: gone_at}}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {
            "name": "vllm-0-1", "namespace": "ml", "uid": "u", "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        } | marks,
        "spec": {"pod": "vllm-0", "kind": "HostGrowth", "policyRef": {"name": "engines"}},
        "status": {"phase": "Resolved"},
    }  # fmt: skip


class Calls:
    def __init__(self) -> None:
        self.applied: list[tuple[Object, str]] = []
        self.deleted: list[str] = []

    async def apply(
        self, kind: Kind, item: Object, subresource: str = "", manager: str = ""
    ) -> Any:
        self.applied.append((item["metadata"].get("annotations") or {}, manager))
        return incident() | {"metadata": incident()["metadata"] | item["metadata"]}

    async def delete(self, kind: Kind, item: Object) -> bool:
        self.deleted.append(item["metadata"]["name"])
        return True


def left(api: Calls, item: Object, now: str) -> float | None:
    store = Store()
    store.put(item)
    return asyncio.run(delete_expired_incidents(cast("Api", api), store, KEY, [item], now, CONFIG))


def test_the_time_is_written_once_and_counts_from_then() -> None:
    api = Calls()
    now = "2026-01-02T00:00:00Z"
    assert left(api, incident(), now) == WEEK_S
    assert api.applied == [({OWNER_DELETED_ANNOTATION: now}, DELETION_FIELD_MANAGER)]
    assert left(api, incident(now), "2026-01-03T00:00:00Z") == WEEK_S - 86400
    assert len(api.applied) == 1
    assert api.deleted == []
    assert left(api, incident(now), "2026-01-09T00:00:00Z") is None
    assert api.deleted == ["vllm-0-1"]


def test_a_time_that_is_none_is_written_again_and_one_ahead_counts_as_now() -> None:
    api = Calls()
    now = "2026-01-02T00:00:00Z"
    assert left(api, incident("yesterday"), now) == WEEK_S
    assert api.applied == [({OWNER_DELETED_ANNOTATION: now}, DELETION_FIELD_MANAGER)]
    assert left(api, incident("2999-01-01T00:00:00Z"), now) == WEEK_S
    assert api.deleted == []


def reconcile(
    api: Api, policy: Object, pods: list[PodView], incidents: list[Object], now: str
) -> None:
    evictions = Evictions(api, lambda: 0.0, CONFIG.intervals.evict_again)
    asyncio.run(reconcile_pods(api, Store(), KEY, policy, pods, incidents, now, CONFIG, evictions))


def test_an_owner_that_is_there_again_takes_the_mark_off() -> None:
    api, item = Calls(), incident("2026-01-02T00:00:00Z")
    policy = {"metadata": {"name": "engines", "namespace": "ml", "uid": "p"}}
    now = "2026-01-03T00:00:00Z"
    reconcile(cast("Api", api), policy, [], [item], now)
    assert api.applied == [({}, DELETION_FIELD_MANAGER)]


def test_a_refused_eviction_is_tried_again_only_after_its_interval() -> None:
    """However often the pods change meanwhile."""
    now, asked, refusals = 0.0, list[str](), ["429 the disruption budget", "429 again", ""]

    class Refusing:
        async def evict(self, namespace: str, pod: str, uid: str) -> str:
            asked.append(uid)
            return refusals.pop(0)

    evictions = Evictions(cast("Api", Refusing()), lambda: now, 15.0)
    pod = PodView.make_without_containers("vllm-0", "1", "2026-01-01T00:00:00Z", False)
    found = []
    for now in (0.0, 0.1, 14.0, 15.0, 16.0, 30.0):  # noqa: B007
        found.append(asyncio.run(evictions.evict(KEY, pod)))
    assert found == [15.0, pytest.approx(14.9), 1.0, 15.0, 14.0, None]
    assert len(asked) == 3
    assert evictions.refusals == {KEY: 2}
    evictions.forget(KEY)
    assert not evictions.refusals


def recorded(name: str, **status: Any) -> Object:
    """An open incident of a pod, as its supervisor wrote it."""
    return incident() | {
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {
            "id": f"{name}-ab", "workloadRef": {"kind": "Pod", "name": "vllm-0"}, "pod": "vllm-0",
            "container": "engine", "epoch": "a:1", "openedAt": "2026-01-01T00:00:00Z",
            "kind": "HostGrowth", "policyRef": {"name": "engines"},
        },
        "status": {"phase": "Confirmed"} | status,
    }  # fmt: skip


def after(api: FakeApi, *incidents: Object) -> dict[str, str]:
    """The phases of ``incidents`` once the operator found that their pod is gone."""
    items = [api.put(one) for one in incidents]
    policy = {"metadata": {"name": "engines", "namespace": "ml", "uid": "p"}}
    reconcile(api, policy, [], items, "2026-01-03T00:00:00Z")
    return {one["metadata"]["name"]: one["status"]["phase"] for one in api.all("LeakIncident")}


def test_an_incident_whose_writes_somebody_used_up_is_ended(definitions: Definitions) -> None:
    """A client with the token of the pod can write the highest revision: then the supervisor can
    write nothing more, not even the end."""
    api = FakeApi(definitions)
    alive = PodView.make_without_containers("vllm-0", "1", "2026-01-01T00:00:00Z", False)
    policy = {"metadata": {"name": "engines", "namespace": "ml", "uid": "p"}}
    items = [
        api.put(recorded("vllm-0-1", revision=100)),
        api.put(recorded("vllm-0-2", revision=99)),
        api.put(recorded("vllm-0-3", revision=100, phase="Resolved", outcome="Trim")),
    ]
    now = "2026-01-03T00:00:00Z"
    reconcile(api, policy, [alive], items, now)
    found = {one["metadata"]["name"]: one["status"] for one in api.all("LeakIncident")}
    assert found["vllm-0-1"]["outcome"] == "WritesExhausted"
    assert found["vllm-0-1"]["phase"] == "Unresolved"
    assert [found[f"vllm-0-{n}"].get("outcome") for n in (2, 3)] == [None, "Trim"]


WHOLE: dict[str, dict[str, Any]] = {
    "texts": {"attribution": {"evidence": ["x" * 400] * 10}, "diagnostics": ["y" * 96]},
    "conditions": {
        "conditions": [
            {"type": f"Their{n}", "status": "True", "reason": "Any", "message": "",
             "lastTransitionTime": "2026-01-01T00:00:00Z"}
            for n in range(4)
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("full", WHOLE)
def test_an_incident_that_its_pod_filled_to_the_brim_ends_as_well(
    definitions: Definitions, full: str
) -> None:
    status = copy.deepcopy(WHOLE[full])
    assert after(FakeApi(definitions), recorded("vllm-0-1", **status)) == {"vllm-0-1": "Unresolved"}


def test_an_end_that_the_supervisor_wrote_meanwhile_stays() -> None:
    """The pod's deletion may reach the operator before the last write of its supervisor does."""
    api = FakeApi()
    seen = api.put(recorded("vllm-0-1"))
    api.put(recorded("vllm-0-1", phase="Resolved", outcome="WorkerRestart"))
    policy = {"metadata": {"name": "engines", "namespace": "ml", "uid": "p"}}
    with pytest.raises(ConflictError):
        reconcile(api, policy, [], [seen], "2026-01-03T00:00:00Z")
    (kept,) = api.all("LeakIncident")
    assert kept["status"] == {"phase": "Resolved", "outcome": "WorkerRestart"}
    reconcile(api, policy, [], [kept], "2026-01-03T00:00:00Z")
    assert list(api.all("LeakIncident")) == [kept]


def test_an_incident_that_cannot_be_written_holds_up_no_other() -> None:
    def refuse(method: str, kind: str, name: str) -> None:
        if name == "vllm-0-1":
            raise Answer(422, "Invalid", "of an earlier release")

    api = FakeApi()
    api.refuse = refuse
    found = after(api, recorded("vllm-0-1"), recorded("vllm-0-2"))
    assert found == {"vllm-0-1": "Confirmed", "vllm-0-2": "Unresolved"}


def oom_killed(name: str, killed: str = "2026-01-01T00:00:00Z") -> PodView:
    """A running pod whose engine was OOM-killed before."""
    ended = {"reason": "OOMKilled", "exitCode": 137, "startedAt": killed, "finishedAt": killed}
    status = {
        "name": "engine", "ready": True, "started": True, "restartCount": 1,
        "state": {"running": {"startedAt": killed}}, "lastState": {"terminated": ended},
    }  # fmt: skip
    meta = {"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return PodView.parse({"metadata": meta, "status": {"containerStatuses": [status]}})


def crash_looping(name: str) -> PodView:
    """A pod whose engine the kubelet starts again with more and more delay."""
    ended = {"reason": "Error", "exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z"}
    status = {
        "name": "engine", "restartCount": 3, "lastState": {"terminated": ended},
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    }  # fmt: skip
    meta = {"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return PodView.parse({"metadata": meta, "status": {"containerStatuses": [status]}})


@pytest.mark.parametrize("make", [oom_killed, crash_looping])
def test_a_status_that_a_former_leader_did_not_write_is_written(
    definitions: Definitions, make: Any
) -> None:
    """The incident's status is a write of its own. Without it, an OOM kill was an open incident for
    as long as its pod lived, which nobody could read and which held back scale-in."""
    api, store, key = FakeApi(definitions), Store(), Key("ml", "qwen")
    api.changed = lambda item, gone: (store.remove if gone else store.put)(item)
    service = {"kind": "InferenceService", "metadata": {"name": "qwen", "namespace": "ml"}}
    pods, writes = [make("qwen-0")], list[str]()

    def refuse(method: str, kind: str, name: str) -> None:
        writes.append(name)
        if len(writes) == 2:
            raise Answer(500, "InternalError", "the leader ended here")

    def run() -> None:
        found, now = store.list_children(key, {"LeakIncident"}), "2026-01-01T00:10:00Z"
        evictions = Evictions(api, lambda: 0.0, 15.0)
        asyncio.run(reconcile_pods(api, store, key, service, pods, found, now, CONFIG, evictions))

    api.refuse = refuse
    with pytest.raises(ApiError, match="the leader ended here"):
        run()
    assert [one.get("status") for one in api.all("LeakIncident")] == [None]
    run()
    (made,) = api.all("LeakIncident")
    assert made["status"]["phase"] in ("Unresolved", "Confirmed")
    assert made["status"]["message"].startswith(("the kernel OOM-killed", "container engine has"))
    count = len(writes)
    run()
    assert len(writes) == count, "it is written once"


def test_an_incident_that_was_deleted_for_later_ones_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status of a pod shows its last OOM kill for as long as the pod lives."""
    api, store, key = FakeApi(), Store(), Key("ml", "qwen")
    api.changed = lambda item, gone: (store.remove if gone else store.put)(item)
    config = replace(CONFIG, kept_incidents=3)
    service = {"kind": "InferenceService", "metadata": {"name": "qwen", "namespace": "ml"}}
    pods = [oom_killed(f"qwen-{n}", f"2026-01-01T00:0{n}:00Z") for n in range(6)]
    evictions = Evictions(api, lambda: 0.0, 15.0)
    for hour in range(1, 9):
        now = f"2026-01-01T0{hour}:00:00Z"
        monkeypatch.setattr(fake_api, "MADE_AT", now)
        for _ in range(10):  # the event of each write leads to another reconcile
            version, found = api._version, store.list_children(key, {"LeakIncident"})
            asyncio.run(
                reconcile_pods(api, store, key, service, pods, found, now, config, evictions)
            )
            if api._version == version:
                break
    assert [one["spec"]["pod"] for one in api.all("LeakIncident")] == ["qwen-3", "qwen-4", "qwen-5"]
    assert api.writes["delete", "LeakIncident"] == 3
