"""Long streams at a drain: a person takes the replica out of service and restarts its engine, as a
remediation does. Streams that end within the deadline are whole; the others are cut, and told so
or broken off, never finished as if they were whole."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec
import pytest
import urllib3

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_sidecar.signals.process_table import identify
from tests.conformance.conftest import Record
from tests.conformance.rig import ANSWER_S, START_S, Rig, until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

STREAMS = 3
FINISHING, CUT = 250, 3500
"""Tokens: of some 100 a second on an idle machine, so that the longer ones take minutes on a busy
one. The checkpoint's context is 4,096."""
LONG_S, SHORT_S = 120.0, 3.0


@dataclass
class Stream:
    """One completion as it arrives. ``whole`` says that it ended with all of its tokens, which its
    finish reason and the end mark say too."""

    tokens: int
    pieces: int = 0
    reasons: list[str] = field(default_factory=list)
    ended: bool = False
    broke: str = ""

    @property
    def whole(self) -> bool:
        return self.reasons == ["length"] and self.ended and not self.broke

    def read(self, url: str) -> None:
        body = {"model": "tiny", "prompt": "the water line", "max_tokens": self.tokens}
        body |= {"ignore_eos": True, "stream": True}
        with urllib3.PoolManager(retries=False) as http:
            try:
                answer = http.request(
                    "POST", f"{url}/v1/completions", body=json.dumps(body), timeout=ANSWER_S,
                    headers={"Content-Type": "application/json"}, preload_content=False,
                )  # fmt: skip
                self._take(answer)
            except urllib3.exceptions.HTTPError as error:
                self.broke = str(error)

    def _take(self, answer: urllib3.BaseHTTPResponse) -> None:
        if answer.status != 200:
            self.broke = f"HTTP {answer.status}"
            return
        rest = b""
        for chunk in answer.stream(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line.removeprefix(b"data: ").strip())

    def _line(self, text: bytes) -> None:
        if text == b"[DONE]":
            self.ended = True
        elif text.startswith(b"{"):
            for choice in json.loads(text).get("choices", []):
                self.pieces += 1
                if choice.get("finish_reason"):
                    self.reasons.append(choice["finish_reason"])


def begin(rig: Rig, tokens: int) -> tuple[list[Stream], list[threading.Thread]]:
    """Streams of which each has had its first tokens."""
    streams = [Stream(tokens) for _ in range(STREAMS)]
    threads = [threading.Thread(target=one.read, args=(rig.url,), daemon=True) for one in streams]
    for thread in threads:
        thread.start()
    until(lambda: all(one.pieces > 3 for one in streams), ANSWER_S, f"tokens: {streams}")
    return streams, threads


def ask(rig: Rig, *arguments: str) -> ActionAnswer:
    """What a person asks of the replica, in the container of its supervisor."""
    command = [sys.executable, "-m", "plimsoll_sidecar.ask", *arguments]
    command += [f"--config={rig.folder / 'state.json'}", f"--run-dir={rig.folder}"]
    command += [f"--state-dir={rig.folder / 'state'}"]
    done = subprocess.run(command, capture_output=True, timeout=LONG_S + 60)
    assert done.stdout, done.stderr
    return msgspec.json.decode(done.stdout, type=ActionAnswer)


def test_streams_that_end_within_the_deadline_are_whole(rig: Rig, record: Record) -> None:
    until(rig.serving, START_S, "an engine that serves")
    rig.rest()
    until(lambda: rig.status().load.inflight == 0, 60, "rest")
    streams, threads = begin(rig, FINISHING)
    since = time.monotonic()
    answer = ask(rig, "drain", "--expected-epoch=current", f"--deadline={LONG_S:.0f}")
    seconds = time.monotonic() - since
    assert answer.outcome == "Succeeded", answer
    assert "idle" in answer.message
    for thread in threads:
        thread.join(5)
    assert all(one.whole for one in streams), streams
    assert seconds < LONG_S, "it waits for them, and no longer"
    assert ask(rig, "resume", "--expected-epoch=current").outcome == "Succeeded"
    assert rig.ask() == 200
    record("drain, streams finish", seconds, f"{STREAMS} streams of {FINISHING} tokens, all whole")


def test_streams_beyond_the_deadline_are_cut(rig: Rig, record: Record) -> None:
    until(rig.serving, START_S, "an engine that serves")
    rig.rest()
    until(lambda: rig.status().load.inflight == 0, 60, "rest")
    everyone = {p for pid in rig.processes() if (p := identify(pid)) is not None}
    streams, threads = begin(rig, CUT)
    since = time.monotonic()
    deadline = f"--deadline={SHORT_S:.0f}"
    answer = ask(rig, "drain", "--expected-epoch=current", deadline)
    assert answer.outcome == "Succeeded", answer
    assert f"{STREAMS} requests are still running" in answer.message
    answer = ask(rig, "restart", "--expected-epoch=current", deadline)
    assert answer.outcome == "Succeeded", answer
    for thread in threads:
        thread.join(ANSWER_S)
    seconds = time.monotonic() - since
    assert not any(one.whole for one in streams), streams
    assert all(one.pieces < CUT for one in streams), streams
    assert not any(identify(p.pid) == p for p in everyone), "no process of it is left"
    ends = sorted({", ".join(one.reasons) or "connection closed" for one in streams})
    told = (
        f"{STREAMS} streams of {CUT} tokens after {SHORT_S:.0f} s, clients saw: {'; '.join(ends)}"
    )
    record("drain, streams are cut at the deadline", seconds, told)
    until(rig.serving, START_S, "an engine that serves")
    ask(rig, "resume", "--expected-epoch=current")
    assert rig.ask() == 200
