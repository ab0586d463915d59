"""Local mode under kill -9: whatever dies, the service is back, once, and nothing is left behind.

Real engine, real supervisor, a real client that streams all the while.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from plimsoll_api.admin import EngineState, Epoch, Role, Status
from plimsoll_cli.local.runner import choose_free_ports

PLIMSOLL = (sys.executable, "-m", "plimsoll_cli.main")
START_S = 150.0
BACK_S = 90.0
MANIFEST = """\
apiVersion: plimsoll.dev/v1alpha1
kind: InferenceService
metadata:
  name: {name}
spec:
  model:
    uri: file://{model}
  engine:
    port: {port}
    args: [--device=cpu, --dtype=float32, --allow-inject, --num-blocks=512]
    env: {env}
  memory:
    host:
      growthBudget: 48Mi
    warmup: 4s
  supervision:
    mode: Recover
    drain:
      deadline: 10s
    stall:
      timeout: {stall}
{more}"""
RECYCLE = """\
    restartBudget: {count: 3, window: 20s}
    recycle: {maxAge: 25s, whenIdleFor: 4s}
"""
LEAK = '[{name: PLIMSOLL_INJECT, value: "request_cycle:payload_bytes=2Mi"}]'

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T | None], limit_s: float) -> T:
    """What ``probe`` returns once it is true; fails the test after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, OSError):
            found = probe()
            if found:
                return found
        time.sleep(0.1)
    pytest.fail(f"not within {limit_s:g} s: {what}")


class Local:
    """``plimsoll run --local`` as a person starts it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        name: str,
        env: str = "[]",
        stall: str = "2m",
        more: str = "",
    ) -> None:
        self.root = folder / name
        manifest = folder / f"{name}.yaml"
        # Of its own, so that nothing else on this machine can take it while the engine starts.
        (port,) = choose_free_ports([None])
        manifest.write_text(
            MANIFEST.format(name=name, model=model, env=env, port=port, stall=stall, more=more)
        )
        self.name = name
        self.output = folder / f"{name}.out"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [*PLIMSOLL, "run", "--local", "--file", str(manifest), "--run-dir", self.root],
                stdout=out,
                stderr=out,
            )
        ready = wait_for("ready", self._ready, START_S)
        self.url, self.supervisor_url = ready.group(1), ready.group(2)
        engine = json.loads((self.root / "run" / "engine.json").read_text())
        self.admin_url = f"http://127.0.0.1:{engine['admin_port']}/admin/v1"

    def _ready(self) -> re.Match[str] | None:
        text = self.output.read_text()
        assert self.process.poll() is None, text
        return re.search(
            r"ready: the OpenAI API is at (\S+)/v1, and metrics are at (\S+)/metrics", text
        )

    def status(self) -> Status:
        token = (self.root / "run" / "admin-token").read_text()
        answer = httpx.get(f"{self.admin_url}/status", headers={"Authorization": f"Bearer {token}"})
        return msgspec.json.decode(answer.raise_for_status().content, type=Status)

    def serving(self) -> Status | None:
        status = self.status()
        return status if status.state is EngineState.SERVING else None

    def pid(self, role: Role) -> int:
        return next(p.pid for p in self.status().processes if p.role is role)

    def state(self) -> dict[str, Any]:
        body: dict[str, Any] = httpx.get(f"{self.supervisor_url}/state").raise_for_status().json()
        if "epoch" not in body:
            raise OSError("the supervisor has taken no sample yet")
        return body

    def seen_serving(self, epoch: str) -> Callable[[], bool]:
        """A probe: true once the supervisor has sampled ``epoch`` with all its processes."""
        return lambda: (
            (state := self.state())["epoch"] == epoch and state["engine_state"] == "serving"
        )

    def epoch(self) -> Epoch:
        return Epoch.parse(self.status().epoch)

    def pids(self, *words: str) -> list[int]:
        """Living processes of this replica whose command line has all of ``words``."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if str(self.root) in command and all(word in command for word in words):
                    found.append(int(folder.name))
        return [pid for pid in found if pid != self.process.pid]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class Load(threading.Thread):
    """Streams one prompt after the other, all with the same answer, until it is stopped."""

    def __init__(self, local: Local, max_tokens: int = 48) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.errors: list[str] = []
        self._local, self._ending = local, threading.Event()
        self._body = {
            "model": local.name, "prompt": "Watch the water line", "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip

    def run(self) -> None:
        with httpx.Client(base_url=self._local.url, timeout=60) as client:
            while not self._ending.is_set():
                try:
                    self.texts.append(self._ask(client))
                except (httpx.HTTPError, ValueError) as error:
                    self.errors.append(repr(error))
                    self._ending.wait(0.2)

    def _ask(self, client: httpx.Client) -> str:
        text, done = "", False
        with client.stream("POST", "/v1/completions", json=self._body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        if not done:
            raise ValueError("the stream ended without [DONE]")
        return text

    def more(self, count: int = 2) -> Callable[[], bool]:
        """A probe: true once so many further texts have come."""
        goal = len(self.texts) + count
        return lambda: len(self.texts) >= goal

    def __enter__(self) -> Load:
        self.start()
        wait_for("first text", self.more(1), BACK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join(60)
        assert not self.is_alive()

    def check(self, breaks: int = 0) -> None:
        assert len(self.errors) <= breaks, self.errors
        assert len(set(self.texts)) == 1


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Local]:
    local = Local(tmp_path_factory.mktemp("local"), tiny, "healthy")
    yield local
    local.kill()


def test_the_worker_is_killed(local: Local) -> None:
    before = local.epoch()
    wait_for("the supervisor sees it", local.seen_serving(str(before)), 30)
    with Load(local) as load:
        os.kill(local.pid(Role.WORKER), signal.SIGKILL)
        wait_for("texts after it", load.more(3), BACK_S)
    load.check()

    after = wait_for("serving", local.serving, BACK_S)
    assert Epoch.parse(after.epoch) == Epoch(before.boot_id, before.number + 1)
    crash = wait_for("its record", lambda: _crash(local, str(before)), 30)
    assert (crash["phase"], crash["reason"]) == ("Unresolved", "WorkerRestarted")
    assert "processes that ended: worker (PID" in "\n".join(crash["attribution"]["evidence"])


def test_the_supervisor_is_killed(local: Local) -> None:
    before = local.epoch()
    (child,) = local.pids("plimsoll_sidecar.main")
    with Load(local) as load:
        os.kill(child, signal.SIGKILL)
        wait_for("another supervisor", lambda: local.pids("plimsoll_sidecar.main") != [child], 30)
        wait_for("its state", local.state, 30)
        wait_for("texts after it", load.more(), BACK_S)
    load.check()

    assert local.epoch() == before
    wait_for("the same epoch", lambda: local.state()["epoch"] == str(before), 30)


def test_the_launcher_is_killed(local: Local) -> None:
    before = local.epoch()
    token = (local.root / "run" / "admin-token").read_text()
    (launcher,) = local.pids("plimsoll_sidecar.launcher")
    (child,) = local.pids("plimsoll_sidecar.main")
    with Load(local) as load:
        os.kill(launcher, signal.SIGKILL)
        wait_for(
            "another launcher",
            lambda: local.pids("plimsoll_sidecar.launcher") not in ([], [launcher]),
            30,
        )
        wait_for("its state", lambda: local.pids("plimsoll_sidecar.main") and local.state(), 30)
        wait_for("texts after it", load.more(), BACK_S)
    load.check()

    assert child not in local.pids()
    assert local.epoch() == before
    assert (local.root / "run" / "admin-token").read_text() == token
    assert "was killed by SIGKILL, restarting" in local.output.read_text()


def test_the_frontend_is_killed(local: Local) -> None:
    before = local.status()
    old = {p.pid for p in before.processes}
    frontend = local.pid(Role.FRONTEND)
    wait_for("the supervisor sees it", local.seen_serving(before.epoch), 30)
    with Load(local) as load:
        os.kill(frontend, signal.SIGKILL)
        # Nothing outlives the frontend that could carry a stream.
        wait_for("an error", lambda: load.errors, 30)
        after = wait_for("serving", local.serving, BACK_S)
        wait_for("texts after it", load.more(), BACK_S)
    assert len(set(load.texts)) == 1

    assert Epoch.parse(after.epoch).boot_id != Epoch.parse(before.epoch).boot_id
    assert after.worker_starts == 1
    assert not old & set(local.pids())
    wait_for("the supervisor follows", lambda: local.state()["epoch"] == local.status().epoch, 30)
    crash = wait_for("its record", lambda: _crash(local, before.epoch), 30)
    assert (crash["phase"], crash["reason"]) == ("Unresolved", "ContainerRestarted")
    evidence = "\n".join(crash["attribution"]["evidence"])
    assert f"frontend (PID {frontend})" in evidence
    assert re.search(r"memory before: host \d", evidence)
    assert local.state()["open"] == [], "nothing follows from it"
    (listed,) = _listed(local, "--kind=EngineCrash", "--limit=1")
    assert listed["spec"]["epoch"] == before.epoch
    told = [*PLIMSOLL, "explain", listed["metadata"]["name"], "--run-dir", str(local.root)]
    story = subprocess.run(told, capture_output=True, check=True, timeout=60, text=True).stdout
    assert "the engine ended unexpectedly" in story
    assert "the engine's output" in story


def test_a_restart_by_hand_is_recorded_and_is_no_crash(local: Local) -> None:
    before = local.epoch()
    wait_for("the supervisor sees it", local.seen_serving(str(before)), 30)
    command = [*PLIMSOLL, "restart", local.name, "--run-dir", str(local.root), "--yes"]
    done = subprocess.run(command, capture_output=True, timeout=BACK_S, text=True)
    assert done.returncode == 0, done.stderr
    wait_for("the next epoch", lambda: local.state()["epoch"] != str(before), BACK_S)
    wait_for("its record", lambda: _ended(local.state(), "ManualRestart"), 30)
    assert _crash(local, str(before)) is None
    (listed,) = _listed(local, "--kind=ManualAction", "--limit=1")
    assert (listed["status"]["phase"], listed["spec"]["epoch"]) == ("Resolved", str(before))
    metrics = httpx.get(f"{local.supervisor_url}/metrics").text
    assert 'plimsoll_incidents_total{kind="ManualAction"} 1.0' in metrics


def test_an_old_engine_is_recycled_when_nobody_asks_it(tmp_path: Path, tiny: Path) -> None:
    local = Local(tmp_path, tiny, "old", more=RECYCLE)
    try:
        before = local.epoch()
        wait_for("the supervisor sees it", local.seen_serving(str(before)), 30)
        begin = time.monotonic()
        with Load(local) as load:
            wait_for("its age", lambda: time.monotonic() - begin > 25 + 10, 60)
            assert local.epoch() == before, "a busy engine is not recycled"
        load.check()
        ended = wait_for("its end", lambda: _ended(local.state(), "WorkerRestart"), BACK_S)
        assert local.epoch() == Epoch(before.boot_id, before.number + 1)
        with Load(local, max_tokens=8) as after:
            wait_for("texts after it", after.more(), BACK_S)
        after.check()
    finally:
        local.kill()
    assert (ended["kind"], ended["phase"]) == ("Recycle", "Resolved")
    assert "whenIdleFor" in str(ended["attribution"])


@pytest.mark.long
def test_a_frontend_that_hangs_is_ended(tmp_path: Path, tiny: Path) -> None:
    """Its processes live, and neither its status nor its serving port answers."""
    local = Local(tmp_path, tiny, "hung", stall="5s")
    try:
        before = local.epoch()
        os.kill(local.pid(Role.FRONTEND), signal.SIGSTOP)
        ended = wait_for("its end", lambda: _ended(local.state(), "EngineRestart"), 120)
        after = wait_for("serving", local.serving, BACK_S)
        assert Epoch.parse(after.epoch).boot_id != before.boot_id
        with Load(local, max_tokens=8) as load:
            wait_for("texts after it", load.more(), BACK_S)
        load.check()
    finally:
        local.kill()
    assert ended["kind"] == "Stall"
    assert ended["phase"] == "Resolved", ended
    assert "neither its status nor its serving port answered" in str(ended["attribution"])


def test_a_second_replica_in_the_same_directory_is_refused(local: Local) -> None:
    manifest = local.root.parent / f"{local.name}.yaml"
    command = [*PLIMSOLL, "run", "--local", "--file", str(manifest), "--run-dir", str(local.root)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "another plimsoll process uses this directory" in done.stderr
    assert local.serving() is not None


def test_ctrl_c_stops_everything_in_order(local: Local) -> None:
    with Load(local) as load:
        local.process.send_signal(signal.SIGINT)
        assert local.process.wait(60) == 0
    assert len(set(load.texts)) == 1

    assert local.pids() == []
    assert "Traceback" not in local.output.read_text()
    engine = (local.root / "engine.log").read_text()
    assert '"after": "stopped"' in engine


def test_children_do_not_outlive_a_killed_parent(tmp_path: Path, tiny: Path) -> None:
    local = Local(tmp_path, tiny, "orphaned")
    assert local.pids("plimsoll_engine")

    local.kill()

    wait_for("no process is left", lambda: not local.pids(), 10)


@pytest.mark.long
def test_the_supervisor_is_killed_in_an_incident(tmp_path: Path, tiny: Path) -> None:
    """At three phases: one incident, told whole, and one restart."""
    local = Local(tmp_path, tiny, "leaky", LEAK)
    try:
        with Load(local, max_tokens=8) as load:
            for phase in ("Trimming", "Restarting", "Verifying"):
                wait_for(phase, lambda: _reached(local, phase), 120)  # noqa: B023
                for child in local.pids("plimsoll_sidecar.main"):
                    os.kill(child, signal.SIGKILL)
            ended = wait_for("a cured leak", lambda: _cured(local.state()), 120)
        load.check()
        assert local.status().worker_starts == 2
        assert local.epoch().number == 2
    finally:
        local.kill()

    assert ended["phase"] == "Resolved", ended
    assert ended["attribution"]["bytes"] > 0
    assert ended["returned_bytes"] > 0
    (incident,) = _listed(local)
    assert incident["metadata"]["name"] == ended["name"]
    steps = incident["status"]["timeline"]
    assert [s["outcome"] for s in steps if s["step"] == "WorkerRestart"] == ["Succeeded"]
    assert any(s["step"] == "Trim" for s in steps)


ORDER = ("Open", "Trimming", "Confirmed", "AwaitingSlot", "Restarting", "Verifying")


def _reached(local: Local, phase: str) -> bool:
    state = local.state()
    phases = [incident.get("phase", "Open") for incident in state["open"]]
    here = any(ORDER.index(one) >= ORDER.index(phase) for one in phases)
    return here or _cured(state) is not None


def _cured(state: dict[str, Any]) -> dict[str, Any] | None:
    return _ended(state, "WorkerRestart")


def _ended(state: dict[str, Any], reason: str) -> dict[str, Any] | None:
    return next((one for one in state["recent"] if one.get("reason") == reason), None)


def _crash(local: Local, epoch: str) -> dict[str, Any] | None:
    """The record of the end of ``epoch`` by itself."""
    kinds = [one for one in local.state()["recent"] if one["kind"] == "EngineCrash"]
    return next((one for one in kinds if one["epoch"] == epoch), None)


def _listed(local: Local, *flags: str) -> list[dict[str, Any]]:
    command = [*PLIMSOLL, "incidents", "--run-dir", str(local.root), "--output", "json", *flags]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    incidents: list[dict[str, Any]] = json.loads(done.stdout)
    return incidents
