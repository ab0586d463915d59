"""Actions of a person on a replica: how long they may take, and how an answer is read."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll_api.names import ASK_SOCKET, compute_action_limit_s
from plimsoll_cli.actions import run_action
from plimsoll_cli.errors import RunError
from plimsoll_cli.main import app
from plimsoll_sidecar import ask


class Recorder:
    """Takes the place of the exec: the arguments and the limit of each call."""

    def __init__(self, **answer: str) -> None:
        self.answer, self.calls = answer, list[tuple[list[str], float]]()

    def __call__(self, arguments: list[str], limit_s: float) -> tuple[int, str, str]:
        self.calls.append((arguments, limit_s))
        return 0, json.dumps(self.answer), ""


def yes(question: str) -> bool:
    raise AssertionError(question)


@pytest.mark.parametrize("deadline_s", [1.0, 900.0, 7200.0])
def test_the_limits_of_an_action_follow_its_deadline(deadline_s: float) -> None:
    reach = Recorder(outcome="Succeeded")
    run_action(reach, "drain", "vllm-0", True, deadline_s, yes)
    ((arguments, limit_s),) = reach.calls
    assert f"--deadline={deadline_s}" in arguments
    assert deadline_s < compute_action_limit_s(deadline_s) < limit_s, (
        "the command line waits longest"
    )


def test_the_words_of_an_answer_decide_nothing() -> None:
    reach = Recorder(outcome="Refused", epoch="a:1", message="the engine is in a:1, not current")
    with pytest.raises(RunError, match="Refused"):
        run_action(reach, "trim", "vllm-0", True, 30.0, yes)
    assert len(reach.calls) == 1


def test_an_option_that_an_action_does_not_have_is_refused() -> None:
    done = CliRunner().invoke(app, ["trim", "vllm-0", "--deadline", "5s", "--yes"])
    assert done.exit_code == 2
    assert "No such option" in done.output
    assert "--deadline" in done.output


def test_a_supervisor_that_is_late_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "compute_action_limit_s", lambda drain_s: drain_s)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / ASK_SOCKET))
        listener.listen(1)
        found = ask.send_to_supervisor(["drain", f"--state-dir={tmp_path}", "--deadline=0.2"])
    assert found is not None
    assert found[0] == 1
    answer = json.loads(found[1])
    assert answer["outcome"] == "Unknown"
    assert "may still act" in answer["message"]
    assert ask.send_to_supervisor(["drain", f"--state-dir={tmp_path}", "--deadline=x"]) is None
