"""The adapter beside a real vLLM server; runs where vllm is installed and a model is named."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll_api.admin import Capability, EngineState
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from tests.ports import free_port

MODEL = os.environ.get("PLIMSOLL_TEST_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"
    ),
    pytest.mark.skipif(not MODEL, reason="PLIMSOLL_TEST_VLLM_MODEL names no model directory"),
]
START_S = 600.0


def test_a_real_server_is_seen_drained_and_ended(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
    command += [f"--model={MODEL}", f"--port={port}", "--enforce-eager", "--max-model-len=512"]
    with (tmp_path / "vllm.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        adapter = ExternalEngine(
            EngineEndpoint(type=EngineType.VLLM, admin_url=url, serving_url=url)
        )
        deadline = time.monotonic() + START_S
        while True:
            assert server.poll() is None, (tmp_path / "vllm.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "vllm did not start in time"
            try:
                status = adapter.status()
            except EngineError:
                time.sleep(1.0)
                continue
            if status.state is EngineState.SERVING:
                break
        assert status.processes[0].pid == server.pid
        assert Capability.TRIM not in status.capabilities, "the development mode is off"
        assert (status.load.running, status.load.waiting) == (0, 0)
        assert status.load.kv_usage_ratio is not None
        act = Command(
            verb=Verb.DRAIN, operation_id="i-1", incident="i", epoch=status.epoch, deadline_s=10.0
        )
        assert adapter.drain(act).message.startswith("idle")
        assert adapter.restart_engine(act).outcome is Outcome.SUCCEEDED
        assert server.wait(30) is not None
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
