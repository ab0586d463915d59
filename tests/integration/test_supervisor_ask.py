"""What a person asks of one replica: fenced, and said plainly when it cannot be."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from typer.testing import CliRunner, Result

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.engines import EngineType
from plimsoll_api.names import ASK_SOCKET, RESTART_BUDGET_RESET_FILE, TOKEN_FILE
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local.run_dir import make_supervisor_caller
from plimsoll_cli.main import app
from plimsoll_sidecar import ask, manual
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.ask_server import AskServer
from plimsoll_sidecar.govern import command as commands
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.manual import NOTES_FOLDER, NoteInbox
from tests.ports import free_port


class Replica:
    """An engine that stands in, and the directories of its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder, self.log = folder, folder / "log"
        self.state = folder / "state"
        for name in ("etc", "run", "state"):
            (folder / name).mkdir()
        self.token, self.config = folder / "run" / TOKEN_FILE, folder / "etc" / CONFIG_FILE
        self.token.write_text("right")
        url = f"http://127.0.0.1:{self.port}"
        engine = EngineEndpoint(type=EngineType.PLIMSOLL, admin_url=url, serving_url=url)
        config = SupervisorConfig(service=ServiceRef(name="s"), engine=engine)
        self.config.write_bytes(encode_config(config))
        arguments = [str(Path(__file__).parent / "standin_engine.py"), f"--port={self.port}"]
        arguments += [f"--token-file={self.token}", f"--log={self.log}"]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def ask(self, *arguments: str) -> tuple[int, ActionAnswer, str]:
        status, out, error = make_supervisor_caller(self.folder)(list(arguments), 60.0)
        return status, msgspec.json.decode(out or "{}", type=ActionAnswer), error

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
    assert "run the command again" in answer.message
    status, answer, _ = replica.ask("trim")
    assert (status, answer.outcome) == (1, "Refused"), "without a fence nothing is done"
    assert len(replica.log.read_text().splitlines()) == 1
    status, answer, _ = replica.ask("restart", "--expected-epoch=current", "--deadline=1")
    assert (status, answer.outcome) == (0, "Succeeded"), "fenced by what the supervisor sees"
    assert answer.epoch != seen.epoch


def test_an_action_whose_note_cannot_be_written_says_so(replica: Replica) -> None:
    epoch = replica.ask("status")[1].epoch
    (replica.state / NOTES_FOLDER).write_text("in the place of the folder")
    status, answer, _ = replica.ask("trim", f"--expected-epoch={epoch}")
    assert (status, answer.outcome) == (0, "Succeeded")
    assert " (no incident records this action" in answer.message


def test_an_action_leaves_a_note_of_how_it_ended(replica: Replica) -> None:
    epoch = replica.ask("status")[1].epoch
    replica.ask("restart", f"--expected-epoch={epoch}", "--deadline=1")
    inbox = NoteInbox(replica.state)
    (action,) = inbox.read()
    assert (action.action, action.epoch, action.outcome) == ("restart", epoch, Outcome.SUCCEEDED)
    assert inbox.read() == [], "an action that ended is given once"
    inbox.delete_read_notes()
    assert list((replica.state / NOTES_FOLDER).iterdir()) == []


def test_a_command_that_was_cut_off_is_noted_as_unknown(tmp_path: Path) -> None:
    script = (
        "import pathlib; from plimsoll_sidecar import manual as b;"
        f"b.write_note(pathlib.Path({str(tmp_path)!r}), b.ManualAction(id='person-00000001',"
        " action='restart', epoch='a:1', at=1.0))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    (action,) = NoteInbox(tmp_path).read()
    assert action.outcome is Outcome.UNKNOWN
    for name, text in (("person-2.json", "{}"), ("person-3.json", "x" * 100_000)):
        (tmp_path / NOTES_FOLDER / name).write_text(text)
    assert NoteInbox(tmp_path).read() == [action], "what is no action is removed"
    assert [one.name for one in (tmp_path / NOTES_FOLDER).iterdir()] == ["person-00000001.json"]


def test_the_supervisor_that_runs_carries_it_out(replica: Replica) -> None:
    """``ask`` itself imports next to nothing then; a person waits for it on little CPU."""
    server = AskServer(replica.state, manual.run_command)
    server.start()
    try:
        arguments = ["trim", "--expected-epoch=current", f"--config={replica.config}"]
        arguments += [f"--run-dir={replica.folder / 'run'}", f"--state-dir={replica.state}"]
        script = (
            "import sys; from plimsoll_sidecar import ask; code = ask.main(sys.argv[1:]);"
            "print(sorted({'msgspec', 'urllib3', 'argparse', 'ssl'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
        )
        answer, modules = done.stdout.splitlines()
        assert msgspec.json.decode(answer, type=ActionAnswer).outcome == "Succeeded", done.stderr
        assert modules == "[]"
        assert (replica.state / ASK_SOCKET).stat().st_mode & 0o777 == 0o600
        status, text = ask.send_to_supervisor(["nonsense", f"--state-dir={replica.state}"]) or (
            0,
            "",
        )
        assert status == 2
        assert "invalid choice: 'nonsense'" in text
        assert ask.send_to_supervisor(["status", f"--state-dir={replica.state}"]) is None
    finally:
        server.stop()
    assert ask.send_to_supervisor(arguments) is None, (
        "nothing was begun: ask carries it out by itself"
    )


def test_a_supervisor_that_ends_in_the_middle_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / ASK_SOCKET))
        listener.listen()

        def accept_and_end() -> None:
            listener.accept()[0].close()

        closer = threading.Thread(target=accept_and_end)
        closer.start()
        status, text = ask.send_to_supervisor(["trim", f"--state-dir={tmp_path}"]) or (0, "")
        closer.join(10)
    assert status == 1
    answer = msgspec.json.decode(text, type=ActionAnswer)
    assert answer.outcome == "Unknown"
    assert "before you try again" in answer.message


def test_a_drain_takes_the_replica_out_and_resume_brings_it_back(replica: Replica) -> None:
    epoch = replica.ask("status")[1].epoch
    fence = f"--expected-epoch={epoch}"
    status, answer, _ = replica.ask("drain", fence, "--deadline=1")
    assert (status, answer.outcome) == (0, "Succeeded")
    assert not readiness.is_ready(str(replica.state))
    status, answer, _ = replica.ask("resume", fence)
    assert (status, answer.outcome) == (0, "Succeeded")
    assert readiness.is_ready(str(replica.state))
    assert (replica.state / RESTART_BUDGET_RESET_FILE).exists()


def test_a_drain_begins_when_no_client_reaches_the_pod_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drained engine refuses requests. Not even that happens if a person resumes meanwhile."""
    state = str(tmp_path)
    done: list[str] = []
    command = Command(verb=Verb.DRAIN, operation_id="o", incident="i", epoch="a:1")
    url = "http://127.0.0.1:1"
    endpoint = EngineEndpoint(type=EngineType.PLIMSOLL, admin_url=url, serving_url=url)
    config = SupervisorConfig(service=ServiceRef(name="s"), engine=endpoint)

    class Engine:
        def drain(self, command: Command, is_wanted: Callable[[], bool]) -> commands.Result:
            done.append("drained")
            return command.make_result(Outcome.SUCCEEDED)

    def drain(meanwhile: Callable[[], None]) -> Outcome:
        def leave(config: object, engine: object) -> None:
            assert not readiness.is_ready(state)
            done.append("left")
            meanwhile()

        monkeypatch.setattr(manual, "_leave_services", leave)
        return manual._drain(state, cast(EngineAdapter, Engine()), config, command).outcome

    assert drain(lambda: readiness.clear_reasons(state, readiness.MANUAL)) is Outcome.REFUSED
    assert done == ["left"]
    assert readiness.is_ready(state)
    assert drain(lambda: None) is Outcome.SUCCEEDED
    assert done == ["left", "left", "drained"]
    assert not readiness.is_ready(state)


def test_an_unusable_request_gets_its_reason(replica: Replica) -> None:
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
    assert "Cannot ask for confirmation without a terminal: to confirm, add --yes" in str(
        unasked.exception
    )
    restarted = replica.plimsoll("restart", "s", "--yes")
    assert restarted.exit_code == 0, restarted.exception
    assert len(replica.log.read_text().splitlines()) == 1
    replica.end()
    gone = replica.plimsoll("trim", "s", "--yes")
    assert isinstance(gone.exception, RunError)
    nowhere = CliRunner().invoke(
        app, ["trim", "s", "--run-dir", str(tmp_path_factory.mktemp("empty")), "--yes"]
    )
    assert "check that the service runs on this machine" in str(nowhere.exception)
