"""Which revision a roll-back returns to, over any sequence of spec changes and readiness.

The operator's own decision and status are run against a Deployment that is played: what it has, and
whether all of its replicas are ready.

Tests ``fleet/revisions.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plimsoll_api.names import POD_HASH_ANNOTATION, REVISION_LABEL
from plimsoll_operator.fleet import revisions
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.kinds import Object, Ref, make_ref
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images, names
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.status.service import make_status

IMAGES = Images("engine:1", "supervisor:1")
NOW = "2026-01-01T00:00:00Z"
DEPLOYMENT = Ref("Deployment", "qwen")


class Fleet:
    """One service, its objects and its status, as operator and Deployment controller leave them."""

    def __init__(self) -> None:
        self.spec: Object = {"model": {"uri": "file:///m"}, "replicas": 3}
        self.status: Object = {}
        self.owned: dict[Ref, Object] = {}
        self.ready = True
        self.leaking: set[str] = set()
        self.set("a")

    def set(self, image: str) -> None:
        self.spec["engine"] = {"image": image}

    def roll_out(self, **options: str) -> None:
        self.spec["rollout"] = self.spec.get("rollout", {}) | options

    @property
    def item(self) -> Object:
        meta = {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 1}
        about = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService"}
        return about | {"metadata": meta, "spec": self.spec, "status": self.status}

    @property
    def running(self) -> str:
        """The image that the Deployment has."""
        template = self.owned[DEPLOYMENT]["spec"]["template"]
        return str(template["spec"]["containers"][0]["image"])

    def pods(self) -> list[Object]:
        label = {REVISION_LABEL: self._revision()}
        return [{"metadata": {"name": f"qwen-{self.running}-{n}", "labels": label}} for n in "012"]

    def _revision(self) -> str:
        return str(self.owned[DEPLOYMENT]["metadata"]["annotations"][POD_HASH_ANNOTATION])

    def incidents(self) -> list[Object]:
        return [
            {
                "kind": "LeakIncident",
                "metadata": {"name": f"i-{image}-{n}"},
                "spec": {"pod": f"qwen-{image}-{n}", "kind": "HostGrowth", "openedAt": NOW},
                "status": {"phase": "Confirmed"},
            }
            for image in self.leaking
            for n in "012"
        ]

    def turn(self, told: bool = True) -> str:
        """One reconcile; returns its action. Not ``told``: the operator ends before the status."""
        service = parse_service(self.item)
        pods = [PodView.parse(one) for one in self.pods()] if self.owned else []
        plan = make_plan(service, self.owned, pods, self.incidents(), IMAGES, self.status)
        for one in plan.desired:
            self.owned[make_ref(one)] = one
        for one in plan.surplus:
            self.owned.pop(make_ref(one), None)
        if told:
            self.status = make_status(
                self.item, service, self._observed(), [], self.incidents(), {}, None, NOW, plan=plan
            )
        return plan.decision.action

    def _observed(self) -> Object:
        count = self.spec["replicas"]
        live = self.owned[DEPLOYMENT]
        seen = {
            "observedGeneration": 1,
            "replicas": count,
            "updatedReplicas": count,
            "readyReplicas": count if self.ready else 0,
        }
        return live | {"metadata": live["metadata"] | {"generation": 1}, "status": seen}


def settled(fleet: Fleet) -> None:
    """All pods are replaced and ready."""
    fleet.ready = False
    fleet.turn()
    fleet.ready = True
    fleet.turn()


@pytest.mark.parametrize("told", [True, False], ids=["in order", "the operator ends in between"])
def test_a_spec_that_changes_during_a_roll_back_does_not_bring_the_bad_one_back(told: bool) -> None:
    fleet = Fleet()
    settled(fleet)
    fleet.set("bad")
    settled(fleet)
    fleet.roll_out(revision="LastGood")
    fleet.ready = False
    fleet.turn(told)
    assert fleet.running == "a"
    fleet.set("mended")
    fleet.turn()
    assert fleet.running == "a"
    fleet.ready = True
    fleet.turn()
    assert fleet.running == "a"
    fleet.roll_out(revision="Spec")
    settled(fleet)
    assert fleet.running == "mended"


def test_a_revision_that_leaked_is_not_gone_back_to_from_the_next_one() -> None:
    fleet = Fleet()
    settled(fleet)
    fleet.set("bad")
    settled(fleet)
    fleet.leaking = {"bad"}
    assert fleet.turn() == "Reported"
    fleet.roll_out(onLeak="Rollback")
    fleet.set("worse")
    fleet.ready = False
    fleet.turn()
    fleet.leaking = {"bad", "worse"}
    assert fleet.turn() == "RolledBack"
    assert fleet.running == "a"


def test_a_roll_out_to_no_replicas_proves_nothing() -> None:
    fleet = Fleet()
    settled(fleet)
    fleet.spec["replicas"] = 0
    fleet.set("untried")
    settled(fleet)
    fleet.spec["replicas"] = 3
    fleet.set("next")
    fleet.ready = False
    fleet.turn()
    fleet.roll_out(revision="LastGood")
    fleet.turn()
    assert fleet.running == "a"


def test_a_status_of_an_earlier_operator_is_understood() -> None:
    old = {"update": "c", "current": "b", "previous": "a"}
    assert revisions.list_good_revisions(old) == ["b", "a"]
    assert revisions.make_revisions_status(old, "c", "", "") == old | {"good": ["b", "a"]}, (
        "and it reads ours"
    )
    assert revisions.make_revisions_status(old, "c", "", "b")["good"] == ["a"]


class Rollouts(RuleBasedStateMachine):
    """What a person, a leak and a crash of the operator may do, one reconcile at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.good: list[str] = []
        self.target: str | None = None
        self._reconciled()

    def _reconciled(self, told: bool = True) -> None:
        fleet = self.fleet
        wanted = fleet.spec["engine"]["image"]
        action = fleet.turn(told)
        went_back = fleet.running != wanted
        if went_back:
            assert fleet.running in self.good, f"{fleet.running} was not good: {self.good}"
        asked = (fleet.spec.get("rollout") or {}).get("revision") == "LastGood"
        if asked and self.target and self.target != wanted:
            assert fleet.running == self.target, "a roll-back keeps its aim"
        if asked and any(one != wanted for one in self.good):
            assert went_back, f"{self.good} were good"
        self.target = fleet.running if asked and went_back else None
        proven = fleet.ready and fleet.spec["replicas"] and told
        if proven:
            self.good = [fleet.running, *(one for one in self.good if one != fleet.running)]
        if action != "None" and told:
            self.good = [one for one in self.good if one != wanted]
        self.good = self.good[: revisions.MAX_GOOD_REVISIONS]

    @rule(image=st.sampled_from("abcd"))
    def change(self, image: str) -> None:
        self.fleet.set(image)
        self._reconciled()

    @rule(image=st.sampled_from("abcd"))
    def change_while_pods_are_replaced(self, image: str) -> None:
        self.fleet.ready = False
        self.fleet.set(image)
        self._reconciled()

    @rule(revision=st.sampled_from(["Spec", "LastGood"]))
    def ask(self, revision: str) -> None:
        self.fleet.roll_out(revision=revision)
        self._reconciled()

    @rule(revision=st.sampled_from(["Spec", "LastGood"]))
    def ask_and_crash(self, revision: str) -> None:
        self.fleet.ready = False
        self.fleet.roll_out(revision=revision)
        self._reconciled(told=False)

    @rule(what=st.sampled_from(["Continue", "Hold", "Rollback"]))
    def choose(self, what: str) -> None:
        self.fleet.roll_out(onLeak=what)
        self._reconciled()

    @rule(ready=st.booleans())
    def pods(self, ready: bool) -> None:
        self.fleet.ready = ready
        self._reconciled()

    @rule(count=st.sampled_from([0, 3]))
    def scale(self, count: int) -> None:
        self.fleet.spec["replicas"] = count
        self._reconciled()

    @rule()
    def leak(self) -> None:
        self.fleet.leaking = {self.fleet.running}
        self._reconciled()

    @rule()
    def nothing(self) -> None:
        before, running = self.fleet.status, self.fleet.running
        self.fleet.turn()
        if self.fleet.running != running:
            self.fleet.turn()  # what it did is to be seen only now
        again = self.fleet.status
        self.fleet.turn()
        assert self.fleet.status == again, "what is observed twice is written once"
        self.fleet.status = before
        self._reconciled()

    @invariant()
    def the_templates_that_may_be_needed_are_kept(self) -> None:
        kept = {where.name for where in self.fleet.owned if where.kind == "ControllerRevision"}
        revisions = self.fleet.status["revisions"]
        assert {names.make_revision_name("qwen", one) for one in revisions["good"]} <= kept
        assert (
            names.make_revision_name("qwen", compute_pod_hash(parse_service(self.fleet.item)))
            in kept
        )


TestRollouts: Any = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
