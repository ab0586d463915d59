"""Restarts of groups while the operator, the controller of LeaderWorkerSets and the API server are
killed at random.

Supervisors take their slots with their own code and account. No kubelet runs: the test writes the
status of the pods. A leader asks for its restart in one of two ways: its container is started
again, or the operator evicts the pod.
"""

from __future__ import annotations

import base64
import math
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act.slots import LeaseSlots
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from tests.cluster.operator.conftest import FAST, eventually
from tests.cluster.operator.test_fleet_safety import OPENED, leaking
from tests.cluster.operator.test_groups import OWN, SLOT, groups, names, pods, service, serving
from tests.lab.chaos import Chaos, Generations, Person
from tests.lab.chaos_record import CONVERGES_S, PLAIN_S, VERBOSE, History, PlainGroup
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.operator import Operator

__all__ = ["groups"]
CHAOS_S = float(os.environ.get("PLIMSOLL_GROUP_CHAOS_S", "180"))
PATIENCE_S = 300.0
"""For what is no figure: on a busy machine, a start takes minutes."""
BUDGET = RestartBudget(count=1000, window_s=3600.0)
GROUPS = (0, 1)


class Leaders:
    """Acts as the kubelets and the supervisors of the leaders, and records what they see."""

    def __init__(
        self, kubectl: Any, cluster: Lab, folder: Path, seed: int, history: History
    ) -> None:
        self._kubectl, self._dice, self._history = kubectl, random.Random(seed), history
        cluster_of = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
        ca, token = folder / "ca.crt", folder / "token"
        ca.write_bytes(base64.b64decode(cluster_of["certificate-authority-data"]))
        token.write_text(kubectl("create", "token", "qwen-supervisor", "--duration=1h").strip())
        self._kube = KubeClient(cluster_of["server"], token, ca)
        self._watching = Generations(kubectl, OWN, history)
        self.uids = self._watching.uids
        self.asked: Counter[int] = Counter()
        self.ways: Counter[str] = Counter()
        self.unasked: list[str] = []
        """Restarts that came before they were asked for."""
        self.steps = dict.fromkeys(GROUPS, "begin")
        """What each group's supervisor does now, and the last error of that."""
        self.most_down = 0
        self.person = Person(kubectl, "qwen", [names(one) for one in GROUPS], history)
        self._again: set[str] = set()
        """UIDs of pods whose container was started again: their status stays as it is."""
        self._status = threading.Lock()
        self._sent: set[tuple[int, int]] = set()
        self._ending, self._resting = threading.Event(), threading.Event()
        supervisors = [threading.Thread(target=self._supervise, args=(one,)) for one in GROUPS]
        self._supervisors = supervisors
        self._threads = [threading.Thread(target=self._play), *supervisors]

    def __enter__(self) -> Leaders:
        self._watching.__enter__()
        eventually(lambda: names(*GROUPS) <= self.uids.keys(), PATIENCE_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._resting.set()
        self._ending.set()
        self._watching.__exit__(None, None, None)
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def rest(self) -> None:
        """No restart begins any more; those that have begun go on."""
        self._resting.set()

    @property
    def at_rest(self) -> bool:
        return not any(thread.is_alive() for thread in self._supervisors)

    def _play(self) -> None:
        while not self._ending.wait(0.3):
            try:
                with self._status:
                    self._kubectl.play_kubelet("qwen", leave=self._again)
                found = pods(self._kubectl)
                self.person.look()
            except AssertionError:
                continue  # the API server is away
            down = sum(not names(one) <= found.keys() for one in GROUPS)
            self.most_down = max(self.most_down, down)

    def _supervise(self, group: int) -> None:
        leader = f"qwen-lws-{group}"
        while not self._resting.wait(self._dice.uniform(1.0, 4.0)):
            before = {name: list(self.uids[name]) for name in names(group)}
            uid = before[leader][-1]
            slots = LeaseSlots(
                self._kube, self._kubectl.namespace, (SLOT,), leader, replica_key=uid
            )
            if not self._insist(partial(self._takes, slots), self._resting):
                continue
            self.asked[group] += 1
            for name, step in (
                ("ask for the restart", partial(self._restart, group, leader, uid)),
                ("wait for new pods", partial(self._is_back, slots, before)),
                ("free the slot", partial(self._frees, slots)),
            ):
                self.steps[group] = f"{name} ({self.asked[group]})"
                self._insist(step, self._ending, group)

    def _takes(self, slots: LeaseSlots) -> bool:
        return slots.acquire("restart", BUDGET) is None

    def _frees(self, slots: LeaseSlots) -> bool:
        slots.release_all_slots()
        return True

    def _insist(
        self, call: Callable[[], bool], end: threading.Event, group: int | None = None
    ) -> bool:
        """Call until it is true, whatever the API server does. Return False after ``end``."""
        while not end.is_set():
            try:
                if group is not None:
                    self._history.note(f"group {group}", self.steps[group])
                if call():
                    return True
            except (KubeError, AssertionError, OSError) as error:
                if group is not None:
                    self.steps[group] = f"{self.steps[group].split(': ')[0]}: {error}"[:500]
            time.sleep(0.3)
        return False

    def _restart(self, group: int, leader: str, uid: str) -> bool:
        """Ask for the restart of the pod ``uid``, once more only where an answer was lost."""
        number = self.asked[group]
        pod = pods(self._kubectl).get(leader)
        if pod is None or pod["metadata"]["uid"] != uid:
            if (group, number) not in self._sent:
                self.unasked.append(f"{leader}, before restart {number}")
            return True
        self._sent.add((group, number))
        if number % 2:
            status = pod["status"]
            for one in status["containerStatuses"]:
                one["restartCount"] = 1
            with self._status:
                self._again.add(uid)
                self._kubectl.patch("pod", leader, {"status": status}, "status")
            self.ways["container"] += 1
        else:
            leaking(self._kubectl, f"leak-{group}-{number}", leader, "qwen")
            time.sleep(1.1)  # objects tell their age in whole seconds
            step = {"time": OPENED, "step": "PodReplace", "outcome": "Requested"}
            leaking(self._kubectl, f"leak-{group}-{number}", leader, "qwen", timeline=[step])
            self.ways["eviction"] += 1
        return True

    def _is_back(self, slots: LeaseSlots, before: dict[str, list[str]]) -> bool:
        """Whether all pods of the group are new and run. Renews the slot."""
        slots.ensure_held("restart", BUDGET)
        found = pods(self._kubectl)
        return all(
            name in found
            and found[name]["metadata"]["uid"] not in seen
            and "containerStatuses" in found[name]["status"]
            for name, seen in before.items()
        )


@pytest.mark.long
@pytest.mark.timeout(CHAOS_S + 1800)
@pytest.mark.parametrize("seed", [int(os.environ.get("PLIMSOLL_CHAOS_SEED", "1"))])
def test_no_group_restarts_twice_while_controllers_are_killed(
    kubectl: Any,
    cluster: Lab,
    operator_account: Path,
    groups: LeaderWorkerSets,
    tmp_path: Path,
    seed: int,
) -> None:
    clocks = [f"--clock={name.replace('_', '-')}={value}" for name, value in FAST.items()]

    def start() -> Operator:
        flags = (*clocks, "--resync", "5")
        return Operator(operator_account, kubectl.namespace, *flags, ready=False, warm=True)

    def converged() -> bool:
        """Whether all groups serve and say so. Notes what is missing."""
        history.note("budget", (kubectl.get("poddisruptionbudget", "qwen") or {}).get("status"))
        if not leaders.at_rest:
            return False
        ended = {one["status"].get("outcome") for one in kubectl.list("leakincidents")}
        found = {
            "incidents": ended <= {"PodReplaced"},
            "pods": serving(kubectl, *GROUPS),
            "status": kubectl.holds("qwen", Ready="ReplicasReady", Progressing="False"),
        }
        history.note("not yet", [what for what, holds in found.items() if not holds])
        return all(found.values())

    def settled() -> bool:
        """Whether both groups and service are, with a note of when. A plain group may be late."""
        chaos.keep_up()
        for what, check in {"converged": converged, "a plain group": plain.runs}.items():
            if what not in after_s and check():
                after_s[what] = time.monotonic() - begin
                history.note(what, f"after {after_s[what]:.1f} s")
        late = time.monotonic() - begin > PLAIN_S
        return "converged" in after_s and ("a plain group" in after_s or late)

    history, plain = History(tmp_path / "history.log"), PlainGroup(kubectl)
    after_s: dict[str, float] = {}
    cluster.plane.restart_controller_manager(VERBOSE)
    groups.start()
    chaos = Chaos(cluster, groups, start, seed, history)
    try:
        plain.start()
        kubectl.apply(service())
        eventually(lambda: serving(kubectl, *GROUPS) and plain.runs(), PATIENCE_S)
        with Leaders(kubectl, cluster, tmp_path, seed, history) as leaders:
            chaos.run(CHAOS_S)
            begin = time.monotonic()
            leaders.rest()
            history.note("kills", "end")
            try:
                plain.restart()
                eventually(settled, 2 * PATIENCE_S)
            except AssertionError as error:
                for what in (leaders.steps, after_s, dict(chaos.kills), dict(chaos.ended)):
                    error.add_note(f"{what}")
                for kind in ("pods", "leases", "leakincidents", "leaderworkersets"):
                    error.add_note(kubectl("get", kind, "-o", "wide"))
                owners = "N:.metadata.name,UID:.metadata.uid,O:.metadata.ownerReferences[*].uid"
                for kind in ("pods", "statefulsets"):
                    error.add_note(kubectl("get", kind, "-o", f"custom-columns={owners}"))
                raise
            time.sleep(5.0)  # no restart comes late
        print(
            f"seed {seed}, {CHAOS_S:.0f} s: killed {dict(chaos.kills)}, ended by themselves"
            f" {dict(chaos.ended)}, restarts asked {dict(leaders.asked)} by {dict(leaders.ways)},"
            f" seen { {name: len(uids) - 1 for name, uids in leaders.uids.items()} },"
            f" {len(leaders.person.deleted)} left-over pods deleted, converged in"
            f" {after_s['converged']:.1f} s, a plain group in"
            f" {after_s.get('a plain group', math.inf):.1f} s"
        )
        assert leaders.unasked == []
        for group in GROUPS:
            assert leaders.asked[group] >= 2
            for name in names(group):
                seen = len(leaders.uids[name]) - 1
                assert seen == leaders.asked[group], f"{name}: restarts asked and seen"
        assert leaders.most_down <= 1, "one slot"
        assert after_s["converged"] <= CONVERGES_S
    finally:
        shutil.copytree(cluster.home / "log", tmp_path / "log")
        cluster.plane.restart_controller_manager()
        last = chaos.operators[-1]
        status = last.stop()
        print(last.log.read_text()[-4000:])
    assert status == 0
    logs = [one.log.read_text() for one in chaos.operators]
    assert not any('"traceback"' in one for one in logs), logs
