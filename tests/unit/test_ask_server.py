"""The socket for manual actions (``ask_server.py``)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plimsoll_api.names import ASK_SOCKET
from plimsoll_sidecar import ask_server, background
from plimsoll_sidecar.ask_server import BUSY_ANSWER, MAX_CONCURRENT_ACTIONS, AskServer


def asked(state_dir: Path, words: str = "status") -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, contextlib.suppress(OSError):
        line.settimeout(10.0)
        line.connect(str(state_dir / ASK_SOCKET))
        line.sendall(words.replace(" ", "\0").encode())
        line.shutdown(socket.SHUT_WR)
        return line.recv(1024)
    return b""


def drip(line: socket.socket) -> None:
    for _ in range(200):
        line.sendall(b"a")
        time.sleep(0.05)


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
            patched.setattr(ask_server, "run_in_thread", no_thread)
            assert {asked(tmp_path) for _ in range(2 * MAX_CONCURRENT_ACTIONS + 1)} == {b""}
        assert asked(tmp_path) == b"0\nstatus"
    finally:
        server.stop()


def test_a_resume_is_taken_while_drains_hold_every_other_place(tmp_path: Path) -> None:
    resumed, begun = threading.Event(), threading.Semaphore(0)

    def handle(words: list[str]) -> tuple[int, str]:
        begun.release()
        if words[0] == "resume":
            resumed.set()
        assert resumed.wait(20.0)
        return 0, words[0]

    server = AskServer(tmp_path, handle)
    server.start()
    try:
        with ThreadPoolExecutor(MAX_CONCURRENT_ACTIONS) as persons:
            drains = [
                persons.submit(asked, tmp_path, "drain --deadline 9")
                for _ in range(MAX_CONCURRENT_ACTIONS)
            ]
            assert all(begun.acquire(timeout=20.0) for _ in range(MAX_CONCURRENT_ACTIONS))
            assert asked(tmp_path, "trim") == BUSY_ANSWER
            assert asked(tmp_path, "resume") == b"0\nresume"
            assert [one.result(20.0) for one in drains] == [b"0\ndrain"] * MAX_CONCURRENT_ACTIONS
    finally:
        server.stop()


def test_words_that_come_a_byte_now_and_then_hold_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask_server, "IO_TIMEOUT_S", 0.3)
    server = AskServer(tmp_path, lambda words: (0, words[0]))
    server.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(tmp_path / ASK_SOCKET))
            with pytest.raises(BrokenPipeError):
                drip(line)
    finally:
        server.stop()
