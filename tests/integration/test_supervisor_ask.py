"""What a person asks of one replica: fenced, and said plainly when it cannot be."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from plimsoll_api.supervision import (
    CONFIG_FILE,
    EngineEndpoint,
    EngineType,
    ServiceRef,
    SupervisorConfig,
    encode,
)
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local.ask import beside
from plimsoll_cli.main import app
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.ask import Answer
from plimsoll_sidecar.launcher import RESET_FILE, TOKEN_FILE


class Replica:
    """An engine that stands in, and the directories of its supervisor."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.log = folder, folder / "log"
        self.state = folder / "state"
        for name in ("etc", "run", "state"):
            (folder / name).mkdir()
        self.token, self.config = folder / "run" / TOKEN_FILE, folder / "etc" / CONFIG_FILE
        self.token.write_text("right")
        url = f"http://127.0.0.1:{self.port}"
        engine = EngineEndpoint(type=EngineType.PLIMSOLL, admin_url=url, serving_url=url)
        config = SupervisorConfig(service=ServiceRef(name="s"), engine=engine)
        self.config.write_bytes(encode(config))
        arguments = [str(Path(__file__).parent / "standin_engine.py"), f"--port={self.port}"]
        arguments += [f"--token-file={self.token}", f"--log={self.log}"]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def ask(self, *arguments: str) -> tuple[int, Answer, str]:
        status, out, error = beside(self.folder)(list(arguments), 60.0)
        return status, msgspec.json.decode(out or "{}", type=Answer), error

    def plimsoll(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--run-dir", str(self.folder)])

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    one = Replica(tmp_path)
    yield one
    one.end()


def test_actions_are_fenced_by_the_epoch_that_was_seen(replica: Replica) -> None:
    status, seen, _ = replica.ask("status")
    assert status == 0
    assert seen.state == "serving"
    assert seen.epoch is not None
    assert seen.supervisor
    assert seen.host_memory, "the processes are visible here"
    assert seen.nvml.startswith("NVML"), "there is a driver or a reason for none"
    fence = f"--expected-epoch={seen.epoch}"
    status, answer, _ = replica.ask("trim", fence)
    assert (status, answer.outcome) == (0, "Succeeded")
    status, answer, _ = replica.ask("restart", fence, "--deadline=1")
    assert (status, answer.outcome) == (0, "Succeeded")
    assert len(replica.log.read_text().splitlines()) == 1
    status, answer, _ = replica.ask("restart", fence)
    assert (status, answer.outcome) == (1, "Refused")
    assert "look again" in answer.message
    status, answer, _ = replica.ask("trim")
    assert (status, answer.outcome) == (1, "Refused"), "without a fence nothing is done"
    assert len(replica.log.read_text().splitlines()) == 1


def test_a_drain_takes_the_replica_out_and_resume_brings_it_back(replica: Replica) -> None:
    epoch = replica.ask("status")[1].epoch
    fence = f"--expected-epoch={epoch}"
    status, answer, _ = replica.ask("drain", fence, "--deadline=1")
    assert (status, answer.outcome) == (0, "Succeeded")
    assert not readiness.is_ready(str(replica.state))
    status, answer, _ = replica.ask("resume", fence)
    assert (status, answer.outcome) == (0, "Succeeded")
    assert readiness.is_ready(str(replica.state))
    assert (replica.state / RESET_FILE).exists()


def test_what_cannot_be_asked_is_said(replica: Replica) -> None:
    replica.token.write_text("wrong")
    status, answer, _ = replica.ask("status")
    assert (status, answer.outcome) == (1, "Failed")
    assert "401" in answer.message
    replica.config.write_text("{}")
    status, _, error = replica.ask("status")
    assert status == 2
    assert "supervisor.json" in error


def test_the_command_line_acts_on_a_service_of_this_machine(
    replica: Replica, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trimmed = replica.plimsoll("trim", "s", "--yes")
    assert trimmed.exit_code == 0, trimmed.exception
    assert trimmed.stdout.startswith("trim s: ")
    unasked = replica.plimsoll("restart", "s")
    assert isinstance(unasked.exception, UsageError)
    assert "Nobody is there to answer: add --yes" in str(unasked.exception)
    restarted = replica.plimsoll("restart", "s", "--yes")
    assert restarted.exit_code == 0, restarted.exception
    assert len(replica.log.read_text().splitlines()) == 1
    replica.end()
    gone = replica.plimsoll("trim", "s", "--yes")
    assert isinstance(gone.exception, RunError)
    nowhere = CliRunner().invoke(
        app, ["trim", "s", "--run-dir", str(tmp_path_factory.mktemp("empty")), "--yes"]
    )
    assert "does the service run here?" in str(nowhere.exception)
