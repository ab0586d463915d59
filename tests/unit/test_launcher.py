"""PID 1 of the supervisor's container survives any end of the supervisor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll_sidecar.launcher import Launcher


def test_a_supervisor_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork bomb in the engine's container uses up the processes of the pod."""

    def spawn(*_: object, **__: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", spawn)
    launcher = Launcher([f"--state-dir={tmp_path}", "--host=127.0.0.1", "--probe-port=0"])
    launcher._start(100.0)
    assert launcher._child_pid == 0
    assert launcher._next_start_at > 100.0
    assert (
        "failed to start the supervisor: Resource temporarily unavailable"
        in capsys.readouterr().err
    )
