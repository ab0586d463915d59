"""A worker's messages to a frontend that is busy, hung or gone.

Tests ``worker/channel.py`` and the loop in ``worker/main.py``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.worker import channel as channels
from plimsoll_engine.worker.channel import Channel, FrontendGoneError
from plimsoll_engine.worker.hooks import WorkerHooks
from plimsoll_engine.worker.main import Worker

FULL = 4 << 20
"""Many times what a socket takes before it is read."""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, socket.socket]]:
    """A worker's channel, and the frontend's end of it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        channel = Channel(str(tmp_path / "s"))
        frontend, _ = listener.accept()
        with frontend:
            frontend.settimeout(10)
            yield channel, frontend
        channel.close()


def message(number: int, size: int = 1 << 16) -> worker_ipc.WorkerFailure:
    return worker_ipc.WorkerFailure(f"{number} ".ljust(size, "x"))


def numbers(frontend: socket.socket, count: int) -> list[int]:
    """Of the next messages that arrive."""
    reader, found = FrameReader(), list[int]()
    while len(found) < count:
        for body in reader.feed(frontend.recv(1 << 20)):
            failed = msgspec.msgpack.decode(body, type=worker_ipc.FromWorker)
            assert isinstance(failed, worker_ipc.WorkerFailure)
            found.append(int(failed.message.split()[0]))
    return found


def test_a_step_does_not_wait_for_a_busy_frontend(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    begun = time.monotonic()
    for number in range(FULL >> 16):
        channel.send(message(number))
    assert channel.receive(0.0) == []
    assert time.monotonic() - begun < 10

    def receive() -> None:
        while channel._unsent:
            channel.receive(0.05)

    sending = threading.Thread(target=receive)
    sending.start()
    assert numbers(frontend, FULL >> 16) == list(range(FULL >> 16))
    sending.join(10)
    frontend.sendall(worker_ipc.encode_frame(worker_ipc.Abort("a")))
    assert channel.receive(5.0) == [worker_ipc.Abort("a")]


def test_the_last_message_arrives_after_all_the_others(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends

    def send() -> None:
        for number in range(FULL >> 16):
            channel.send(message(number))
        channel.send(message(FULL >> 16), flush=True)

    sending = threading.Thread(target=send)
    sending.start()
    assert numbers(frontend, (FULL >> 16) + 1) == list(range((FULL >> 16) + 1))
    sending.join(10)
    assert channel._unsent_bytes == 0


class Engine:
    """Each step makes a message of 64 KiB."""

    has_work, is_transferring = True, False

    def __init__(self) -> None:
        self.counters = SimpleNamespace(steps=0)
        self.aborted: list[str] = []

    def step(self) -> Any:
        self.counters.steps += 1
        return SimpleNamespace(scores=[], tokens=[], dropped=[message(self.counters.steps - 1)])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def poll(self, is_idle: bool) -> None:
        assert not is_idle

    def capture_next_graph(self) -> bool:
        return False


def test_a_worker_makes_no_steps_at_the_bound_but_hears_what_the_frontend_says(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, frontend = ends
    monkeypatch.setattr(channels, "MAX_UNSENT_BYTES", FULL)
    monkeypatch.setattr(Worker, "_create_report", lambda _: message(-1))
    monkeypatch.setattr(Worker, "_shut_down", lambda _: None)
    engine = Engine()
    lifecycle: Any = SimpleNamespace(engine=engine, member=SimpleNamespace(leader=None))
    serving = threading.Thread(target=Worker(lifecycle, channel, WorkerHooks()).serve)
    serving.start()
    _wait_until(lambda: channel.is_full)
    frontend.sendall(worker_ipc.encode_frame(worker_ipc.Abort("a")))
    _wait_until(lambda: bool(engine.aborted))
    steps = engine.counters.steps
    time.sleep(0.6)  # longer than between two reports
    assert engine.counters.steps == steps
    assert FULL < channel._unsent_bytes < FULL + (1 << 17)
    found = [number for number in numbers(frontend, 2 * steps) if number >= 0]
    assert found == list(range(len(found))), "and it goes on when the frontend reads again"
    frontend.sendall(worker_ipc.encode_frame(worker_ipc.Stop()))
    serving.join(10)
    assert not serving.is_alive()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_frontend_that_hangs_is_given_up_at_the_bound_and_between_steps(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = ends
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 0.1)
    for number in range(FULL >> 16):
        channel.send(message(number))
    time.sleep(0.1)
    with pytest.raises(FrontendGoneError, match="not read its socket"):
        channel.receive(0.0)
    with pytest.raises(FrontendGoneError, match="not read its socket"):
        channel.send(message(0), flush=True)


def test_a_frontend_that_is_gone_is_noticed(ends: tuple[Channel, socket.socket]) -> None:
    channel, frontend = ends
    frontend.close()
    with pytest.raises(FrontendGoneError, match="closed the socket"):
        channel.receive(1.0)
    with pytest.raises(FrontendGoneError, match="frontend's socket"):
        channel.send(message(0))
