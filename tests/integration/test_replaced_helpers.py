"""A server that starts its helper processes again, as it appears to two supervisors in a row."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import Epoch
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_api.supervisor_config import (
    CONTAINER_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_sidecar import manual
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.storage import LastKnownEngine

SERVER = """
import http.server, os, signal, sys, time

def keep(*_):
    global helper, began
    began = time.monotonic()
    helper = os.fork()
    if not helper:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while os.getppid() == main:
            time.sleep(0.1)
        os._exit(0)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        steps = int((time.monotonic() - began) * 100)
        page = "vllm:num_requests_running 1.0\\nvllm:num_requests_waiting 0.0\\n"
        page += f"vllm:kv_cache_usage_perc 0.1\\nvllm:generation_tokens_total {steps}.0\\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_):
        pass

signal.signal(signal.SIGCHLD, lambda *_: (os.waitpid(helper, 0), keep()))
main = os.getpid()
keep()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Server:
    def __init__(self, folder: Path) -> None:
        program = folder / "server.py"
        program.write_text(SERVER)
        self.container = f"engine-{secrets.token_hex(4)}"
        environment = os.environ | {CONTAINER_ENV: self.container}
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        url = f"http://127.0.0.1:{self.port}"
        self.endpoint = EngineEndpoint(EngineType.VLLM, url, url, container=self.container)

    def adapter(self) -> ExternalEngine:
        return ExternalEngine(self.endpoint)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    yield one
    one.process.kill()
    one.process.wait(10)
    assert one.process.stdout is not None
    one.process.stdout.close()


def test_the_next_supervisor_knows_the_epoch_of_replaced_helpers(
    server: Server, tmp_path: Path
) -> None:
    first = server.adapter()
    began = first.status()
    helper = next(p.pid for p in began.processes if p.pid != server.process.pid)
    time.sleep(2.5)  # until its page shows more than that of a new helper
    assert first.status().epoch == began.epoch
    os.kill(helper, signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while (epoch := first.status().epoch) == began.epoch and time.monotonic() < deadline:
        time.sleep(0.25)
    assert Epoch.parse(epoch).number == 2

    later = server.adapter()
    later.continue_epoch(epoch)
    assert later.status().epoch == epoch
    pending = Command(verb=Verb.DRAIN, operation_id="i-1-drain", incident="i", epoch=epoch)
    assert later.drain(pending).outcome is Outcome.SUCCEEDED, "it was decided in this epoch"

    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.write(GovernorState(), engine=LastKnownEngine(epoch=epoch))
    journal.close()
    config = SupervisorConfig(service=ServiceRef(name="s"), engine=server.endpoint)
    (tmp_path / "supervisor.json").write_bytes(encode_config(config))
    words = ["drain", f"--expected-epoch={epoch}", f"--run-dir={tmp_path}"]
    words += [f"--config={tmp_path}/supervisor.json", f"--state-dir={tmp_path}"]
    status, answer = manual.run_command(words)
    assert status == 0, answer

    other = server.adapter()
    other.continue_epoch("1f-2:7")
    assert other.status().epoch == began.epoch, "another main process says nothing about this one"
