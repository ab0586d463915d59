"""A supervisor's process takes a new configuration without a restart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from plimsoll_api import supervision
from plimsoll_api.supervision import (
    EngineEndpoint,
    EngineType,
    LogLevel,
    Mode,
    ServiceRef,
    Supervision,
    SupervisorConfig,
)

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
    fresh.write_bytes(supervision.encode(config))
    fresh.rename(path)


def test_mode_and_log_level_change_in_a_running_supervisor(tmp_path: Path) -> None:
    file, said = tmp_path / "supervisor.json", tmp_path / "log"
    write(file, Mode.OBSERVE, LogLevel.INFO)
    arguments = ["--config", file, "--run-dir", tmp_path, "--state-dir", tmp_path]
    command = [sys.executable, "-m", "plimsoll_sidecar.main", *arguments, "--host", "127.0.0.1"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    with said.open("w") as log:
        process = subprocess.Popen([*command, "--metrics-port=0"], stderr=log, env=environ)
    try:
        time.sleep(3.0)
        assert " DEBUG " not in said.read_text()
        write(file, Mode.RECOVER, LogLevel.DEBUG)
        wait_for(said, "no status: ")
        assert "the configuration changed: mode Recover" in said.read_text()
        write(file, Mode.OBSERVE, LogLevel.ERROR)
        wait_for(said, "the configuration changed: mode Observe")
        time.sleep(0.5)
        before = said.stat().st_size
        time.sleep(1.0)
        assert said.stat().st_size == before
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(20) == 0


def wait_for(said: Path, text: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while text not in said.read_text():
        assert time.monotonic() < deadline, f"{text!r} is not in: {said.read_text()[-2000:]}"
        time.sleep(0.1)
