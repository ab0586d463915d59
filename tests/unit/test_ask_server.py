"""The socket for manual actions (``ask_server.py``)."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from plimsoll_sidecar import ask_server, background
from plimsoll_sidecar.ask_server import AT_ONCE, AskServer
from plimsoll_sidecar.paths import SOCKET


def asked(state_dir: Path) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, contextlib.suppress(OSError):
        line.settimeout(10.0)
        line.connect(str(state_dir / SOCKET))
        line.sendall(b"status")
        line.shutdown(socket.SHUT_WR)
        return line.recv(1024)
    return b""


def test_actions_without_a_thread_leave_room_for_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    server = AskServer(tmp_path, lambda arguments: (0, " ".join(arguments)))
    server.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(ask_server, "once", no_thread)
            assert [asked(tmp_path) for _ in range(AT_ONCE + 1)] == [b""] * (AT_ONCE + 1)
        assert asked(tmp_path) == b"0\nstatus"
    finally:
        server.stop()
