"""A supervisor's process takes a new configuration without a restart, and watches without one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.supervision import LogLevel, Mode, Supervision
from plimsoll_api.supervisor_config import (
    POD_ENGINE_ENV,
    EngineEndpoint,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_cli.local.runner import choose_free_ports

NOBODY = "http://127.0.0.1:1"


def write(path: Path, mode: Mode, level: LogLevel) -> None:
    """As the kubelet does: the file is whole at any time."""
    config = SupervisorConfig(
        service=ServiceRef(name="live"),
        engine=EngineEndpoint(EngineType.PLIMSOLL, admin_url=NOBODY, serving_url=NOBODY),
        supervision=Supervision(mode=mode, log_level=level),
        sample_interval_s=0.2,
    )
    fresh = path.with_suffix(".new")
    fresh.write_bytes(supervisor_config.encode_config(config))
    fresh.rename(path)


def test_mode_and_log_level_change_in_a_running_supervisor(tmp_path: Path) -> None:
    file, said = tmp_path / "supervisor.json", tmp_path / "log"
    write(file, Mode.OBSERVE, LogLevel.INFO)
    arguments = ["--config", str(file), "--run-dir", str(tmp_path), "--state-dir", str(tmp_path)]
    command = [sys.executable, "-m", "plimsoll_sidecar.main", *arguments, "--host", "127.0.0.1"]
    (port,) = choose_free_ports([None])
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    with said.open("w") as log:
        process = subprocess.Popen([*command, f"--metrics-port={port}"], stderr=log, env=environ)
    try:
        sampled_since(port, 0.0)
        assert '"level": "debug"' not in said.read_text()
        write(file, Mode.RECOVER, LogLevel.DEBUG)
        wait_for(said, "engine's status")
        assert "applied a new configuration with mode Recover" in said.read_text()
        write(file, Mode.OBSERVE, LogLevel.ERROR)
        wait_for(said, "applied a new configuration with mode Observe")
        newest = sampled_since(port, time.time())
        before = said.stat().st_size
        for _ in range(3):
            newest = sampled_since(port, newest)
        assert said.stat().st_size == before
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_a_supervisor_without_configuration_watches_and_its_pod_stays_ready(tmp_path: Path) -> None:
    """As in a pod whose policy was deleted: through the launcher, which answers the kubelet."""
    file, said = tmp_path / "supervisor.json", tmp_path / "log"
    own = PodEngine(EngineEndpoint(EngineType.VLLM, NOBODY, NOBODY, container="server"))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    environ |= {"POD_NAME": "chat-0", "POD_NAMESPACE": "team"}
    environ |= {POD_ENGINE_ENV: msgspec.json.encode(own).decode()}
    (port, probes) = choose_free_ports([None, None])
    command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--config", str(file)]
    command += ["--run-dir", str(tmp_path / "run"), "--state-dir", str(tmp_path / "state")]
    command += ["--host=127.0.0.1", f"--metrics-port={port}", f"--probe-port={probes}"]
    with said.open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=environ)
    try:
        newest = sampled_since(port, 0.0)
        for _ in range(3):
            newest = sampled_since(port, newest)
        base = f"http://127.0.0.1:{port}"
        state = httpx.get(f"{base}/state").json()
        assert (state["mode"], state["service"]) == ("Observe", "chat-0")
        assert state["config_error"].startswith(
            "the supervisor only observes, because it has no configuration"
        )
        assert "plimsoll_supervisor_config_valid 0.0" in httpx.get(f"{base}/metrics").text
        assert "no configuration" in httpx.get(base).text
        assert httpx.get(f"http://127.0.0.1:{probes}/ready").status_code == 200
        assert said.read_text().count("no configuration") == 1
        assert "supervisor exited" not in said.read_text()
        write(file, Mode.RECOVER, LogLevel.INFO)
        wait_for(
            said, "restarting, because the new configuration has another engine, service or slot"
        )
        sampled_since(port, time.time())
        state = httpx.get(f"{base}/state").json()
        assert (state["mode"], state["config_error"]) == ("Recover", None)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def sampled_since(port: int, since: float, limit_s: float = 30.0) -> float:
    """The time of a sample that was taken after ``since``, in Unix seconds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            newest = httpx.get(f"http://127.0.0.1:{port}/state").json().get("time", 0.0)
            if newest > since:
                return float(newest)
        time.sleep(0.05)
    raise AssertionError(f"no sample within {limit_s:g} s")


def wait_for(said: Path, text: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while text not in said.read_text():
        assert time.monotonic() < deadline, f"{text!r} is not in: {said.read_text()[-2000:]}"
        time.sleep(0.1)
