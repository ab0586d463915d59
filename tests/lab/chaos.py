"""Kill the processes of a lab at random, and start them again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

from plimsoll_operator.fleet.leftover_workers import LEFTOVER_MESSAGE
from tests.lab.chaos_record import History
from tests.lab.errors import LabError
from tests.lab.kube import Kube, conditions, eventually
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.operator import Operator
from tests.lab.processes import alive, die_with_parent

PAUSE_S, DOWN_S = (3.0, 10.0), (0.0, 4.0)
"""Between two kills, and from a kill to the next start."""
BACK_S = 900.0
"""For an API server that starts on a busy machine: its own checks may end it several times."""
JOIN_S = 60.0


class Chaos:
    """The processes that are killed with SIGKILL, and started again. ``kills`` counts them.

    As a kubelet would, it also starts again what ends by itself without an API server.
    """

    def __init__(
        self,
        lab: Lab,
        groups: LeaderWorkerSets,
        operator: Callable[[], Operator],
        seed: int,
        history: History,
        kubelet: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """``kubelet`` is whether the one of the lab's node is killed, too. ``meanwhile`` is called
        each second and may fail with an AssertionError: the API server is away."""
        self._meanwhile = meanwhile
        self._lab, self._groups, self._start = lab, groups, operator
        self._dice, self._history = random.Random(seed), history
        self._node = lab.node if kubelet else None
        self.operators = [operator()]
        self.kills: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Return with all processes running."""
        victims = [self._kill_operator, self._kill_groups, self._kill_server]
        if self._node is not None:
            victims.append(self._kill_kubelet)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._wait(self._dice.uniform(*PAUSE_S))
            self._dice.choice(victims)()
            self._history.note("kills", f"{dict(self.kills)}, all run again")

    def keep_up(self) -> None:
        """Start what has ended by itself."""
        if not self.operators[-1].runs():
            self.ended["operator"] += 1
            self.operators.append(self._start())
        if not alive(self._groups.pid):
            self.ended["LeaderWorkerSet controller"] += 1
            self._groups.run()
        if self._node is not None and not alive(self._lab.plane.processes.running["kubelet"]):
            self.ended["kubelet"] += 1
            self._node.start_kubelet()
        with contextlib.suppress(AssertionError):
            self._meanwhile()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self.keep_up()

    def _down(self, name: str) -> None:
        self.kills[name] += 1
        self._history.note("kills", name)
        time.sleep(self._dice.uniform(*DOWN_S))

    def _kill_operator(self) -> None:
        self.operators[-1].kill()
        self._down("operator")
        self.operators.append(self._start())

    def _kill_groups(self) -> None:
        os.kill(self._groups.pid, signal.SIGKILL)
        self._down("LeaderWorkerSet controller")
        self._groups.run()

    def _kill_server(self) -> None:
        os.kill(self._lab.plane.processes.running["kube-apiserver"], signal.SIGKILL)
        self._down("API server")
        eventually(self._server_is_back, "the API server is back", BACK_S)

    def _server_is_back(self) -> bool:
        """On a busy machine, its own checks at a start end it again."""
        try:
            self._lab.plane.restart_api_server()
        except LabError:
            self.ended["API server"] += 1
            return False
        return True

    def _kill_kubelet(self) -> None:
        assert self._node is not None
        self._node.kill_kubelet()
        self._down("kubelet")
        self._node.start_kubelet()


class Person:
    """Deletes a pod by hand where the condition ``Progressing`` of a service asks for it.

    The garbage collector may miss the deletion of a StatefulSet that is recreated between two lists
    of its, and the worker of the old group stays. ``deleted`` has the UIDs of such pods.
    """

    def __init__(
        self, kube: Kube, service: str, groups: Sequence[Collection[str]], history: History
    ) -> None:
        """``groups`` are the names of the leader and the worker of each."""
        self._kube, self._service, self._history = kube, service, history
        self._groups = [sorted(names) for names in groups]
        self.deleted: set[str] = set()

    def look(self) -> None:
        """Read the condition, and delete what is left over. AssertionError without an API."""
        found = conditions(self._kube.get("plinf", self._service) or {})
        messages = [one["message"] for one in found if one["type"] == "Progressing"]
        if not any(LEFTOVER_MESSAGE in one for one in messages):
            return
        for names in self._groups:
            leader, worker = (self._kube.get("pod", name) for name in names)
            if leader is None or worker is None:
                continue
            older = worker["metadata"]
            if older["creationTimestamp"] < leader["metadata"]["creationTimestamp"]:
                self.deleted.add(older["uid"])
                self._history.note("left over", f"{older['uid']}: {messages}")
                self._kube.delete("pod", older["name"])


class Watching:
    """What kubectl prints of each object of a watch, and of the watches after it.

    A watch tells of an object that lives for a moment, too. Without an API server it ends.
    """

    def __init__(self, kube: Kube, kind: str, selector: str, columns: str) -> None:
        place = [f"--kubeconfig={kube.kubeconfig}", f"-n={kube.namespace}"]
        get = ["get", kind, f"-l={selector}", "--watch", "-o", f"jsonpath={columns}{{'\\n'}}"]
        self._command = [*kube.kubectl, *place, *get]
        self._ending = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run)

    def see(self, line: str) -> None:
        """Take note of ``line``, which tells of one object. Called by a thread."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ending.set()
        deadline = time.monotonic() + JOIN_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._process is not None:
                self._process.kill()
            self._thread.join(0.5)

    def _run(self) -> None:
        while not self._ending.is_set():
            with subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - the threads hold no lock here
            ) as self._process:
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    self.see(line)
            self._ending.wait(1.0)  # the API server is away


class Generations(Watching):
    """The pods that a selector finds. ``uids`` has those of each name, the first one first."""

    def __init__(self, kube: Kube, selector: str, history: History) -> None:
        columns = "{.metadata.name} {.metadata.uid} {.metadata.deletionTimestamp}"
        super().__init__(kube, "pods", selector, columns)
        self.uids: dict[str, list[str]] = {}
        self._history = history

    def see(self, line: str) -> None:
        """Add the UID of a new pod."""
        name, uid, *deleted = line.split()
        self._history.note(f"pod {name}", f"{uid} {'is deleted' if deleted else ''}")
        seen = self.uids.setdefault(name, [])
        if uid not in seen:
            seen.append(uid)
