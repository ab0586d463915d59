"""What ``plimsoll inject`` writes is what supervises: flags, environment and configuration of this
supervisor come from the manifest that it rendered, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_operator.injection.configuration import InjectedDocument
from plimsoll_operator.injection.documents import inject_document
from plimsoll_operator.injection.options import DEFAULT_MEMORY_POLICY, InjectionOptions
from tests.conformance.conftest import Record
from tests.conformance.rig import START_S, Rig, until
from tests.ports import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

SEEN_S = 60.0


def injected(rig: Rig) -> InjectedDocument:
    """A Deployment that runs the rig's own command line, with a supervisor."""
    return inject_document(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "conformance"},
            "spec": {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": rig.container,
                                "image": f"example/{rig.peer.type.value}:{rig.peer.version}",
                                "command": [*rig.peer.command, f"--port={rig.port}"],
                                "securityContext": {"runAsUser": os.getuid()},
                            }
                        ]
                    }
                }
            },
        },
        InjectionOptions(
            image="example/supervisor", memory=replace(DEFAULT_MEMORY_POLICY, warmup_s=5.0)
        ),
    )


class Pod:
    """The supervisor's container as a kubelet would start it: its mounts are folders below
    ``folder``, its ports are free ones of this machine."""

    def __init__(self, made: InjectedDocument, folder: Path) -> None:
        spec: dict[str, Any] = made.document["spec"]["template"]["spec"]
        (self.engine,) = spec["containers"]
        (container,) = spec["initContainers"]
        mounts = {one["mountPath"]: folder / one["name"] for one in container["volumeMounts"]}
        for path in mounts.values():
            path.mkdir(parents=True)
        assert made.config_map is not None
        for name, text in made.config_map["data"].items():
            (mounts["/etc/plimsoll"] / name).write_text(text)
        ports = {one["name"]: free_port() for one in container["ports"]}
        self.url = f"http://127.0.0.1:{ports['metrics']}"
        self.probe = f"http://127.0.0.1:{ports['probe']}"
        self.readiness = container["readinessProbe"]["httpGet"]["path"]
        numbers = {str(one["containerPort"]): str(ports[one["name"]]) for one in container["ports"]}
        self.command = [sys.executable, *container["command"][1:]]
        for number, word in enumerate(self.command):
            flag, _, value = word.partition("=")
            inside = next((at for at in mounts if value == at or value.startswith(f"{at}/")), None)
            if inside is not None:
                self.command[number] = f"{flag}={mounts[inside]}{value.removeprefix(inside)}"
            elif flag.endswith("-port"):
                self.command[number] = f"{flag}={numbers[value]}"
        fields = {"metadata.name": "conformance-0", "metadata.namespace": "default"}
        self.environment = os.environ | {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }


def get(url: str) -> tuple[int, bytes]:
    """Status and body; 0 where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError:
        return 0, b""


def test_what_inject_writes_supervises_the_engine(rig: Rig, record: Record, tmp_path: Path) -> None:
    until(rig.serving, START_S, "an engine that serves")
    pod = Pod(injected(rig), tmp_path)
    assert {"name": CONTAINER_ENV, "value": rig.container} in pod.engine["env"], "as the rig has it"
    log = tmp_path / "supervisor.log"

    def state() -> dict[str, Any]:
        status, body = get(f"{pod.url}/state")
        return dict(json.loads(body)) if status == 200 and body != b"{}" else {}

    def metrics() -> str:
        return get(f"{pod.url}/metrics")[1].decode()

    begin = time.monotonic()
    with log.open("wb") as out:
        running = subprocess.Popen(pod.command, env=pod.environment, stderr=out)
    try:
        until(lambda: get(f"{pod.probe}{pod.readiness}")[0] == 200, SEEN_S, "a ready supervisor")
        until(lambda: state().get("epoch"), SEEN_S, f"its engine: {log.read_text()}")
        seconds = time.monotonic() - begin
        assert state()["epoch"].partition(":")[0] == rig.status().epoch.partition(":")[0]
        assert state()["mode"] == "Observe", "what inject writes where nobody chose"
        rig.load()
        baseline = 'plimsoll_memory_baseline_bytes{kind="host"}'
        until(lambda: baseline in metrics(), 2 * SEEN_S, f"a baseline: {log.read_text()}")
        assert 'plimsoll_memory_budget_bytes{kind="host"} 2.147483648e+09' in metrics()
        assert 'plimsoll_signal_unknown_samples_total{signal="host"} 0.0' in metrics()
    finally:
        rig.rest()
        running.terminate()
        running.wait(30)
    record("supervised as inject writes it", seconds, "until the engine is known")
