"""Clients of a service: real HTTP connections that stream completions and remember every text."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from tests.lab.kube import eventually

PROMPTS = ("the water line", "the cargo", "the master", "the weights", "the sailors", "the mark")
MAX_TOKENS = 128
WHOLE = ("stop", "length")
"""Reasons to finish of an answer that is whole: vLLM ends those that it cuts off with "abort"."""
SILENCE_S = 60.0
"""A stream that says nothing for longer than this is broken."""

REACHED_S = 30.0
"""kube-proxy has forwarded the Service's address by then."""


@dataclass
class Streams:
    """``count`` threads that ask one prompt after the other until the block ends.

    ``texts`` holds every different answer to each prompt: greedy decoding has one.
    """

    url: str
    model: str
    count: int = 4
    texts: dict[str, set[str]] = field(default_factory=dict)
    finished: int = 0
    failures: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Longest silence of each request in seconds."""

    def __enter__(self) -> Self:
        # A first packet that comes while kube-proxy writes a new Service's rules is let through
        # untranslated, and its connection stays so until it times out. That is no broken stream.
        eventually(self._reached, f"{self.url} is forwarded", REACHED_S)
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * SILENCE_S)

    def _reached(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=httpx.Timeout(5, read=SILENCE_S)) as client:
            turn = number
            while not self._stop.is_set():
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                try:
                    text, pause = ask(client, self.model, prompt)
                except (httpx.HTTPError, ValueError) as error:
                    at = time.monotonic() - self._began
                    with self._lock:
                        self.failures.append(f"{at:.1f} s: {type(error).__name__}: {error}")
                    self._stop.wait(1)
                    continue
                with self._lock:
                    self.finished += 1
                    self.pauses.append(pause)
                    self.texts.setdefault(prompt, set()).add(text)

    @property
    def forked(self) -> dict[str, set[str]]:
        """Prompts that got different answers."""
        return {prompt: texts for prompt, texts in self.texts.items() if len(texts) > 1}


def ask(client: httpx.Client, model: str, prompt: str, **more: object) -> tuple[str, float]:
    """The whole streamed text and the longest silence in it. ValueError for one that breaks off.

    ``more`` are further fields of the request.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        **more,
    }
    parts: list[str] = []
    finish, longest, last = None, 0.0, time.monotonic()
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {response.read().decode()[:300]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(f"the stream broke: {event['error']}")
            for choice in event["choices"]:
                parts.append(choice["text"])
                finish = choice["finish_reason"] or finish
    if finish not in WHOLE:
        raise ValueError(f"the stream ended with the finish_reason {finish}")
    return "".join(parts), longest
