"""The faults of :mod:`plimsoll_faults.kinds` that are the frontend's.

They last as long as its process, whatever the worker's epoch. Nothing here runs without
``PLIMSOLL_INJECT``.
"""

from __future__ import annotations

import os

from prometheus_client import Counter

from plimsoll_api.admin import Role
from plimsoll_engine.frontend.hooks import FrontendHooks
from plimsoll_engine.frontend.observability.ledger_metrics import PREFIX
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import Generation, RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_faults import inject, kinds
from plimsoll_faults.tampering import turned


class RememberingTokenizer(Tokenizer):
    """Keeps every prompt and its tokens."""

    def __init__(self, sound: Tokenizer, repeat: int) -> None:
        self.__dict__.update(sound.__dict__)
        self._repeat = repeat
        self.kept: dict[tuple[str, bool], list[list[int]]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, kept for ever."""
        return self._keep((text, True), super().encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt, kept for ever."""
        return self._keep((text, False), super().encode_rendered(text))

    def _keep(self, key: tuple[str, bool], ids: list[int]) -> list[int]:
        self.kept[key] = [list(ids) for _ in range(self._repeat)]
        return ids


class UnregisteredLog(RequestLog):
    """Keeps the state of a request whose client left before its first token."""

    payload_bytes: int
    kept: dict[str, tuple[Generation, bytearray]]

    def release(self, request_id: str) -> Generation | None:
        """Release as the sound log does.

        A request that ended before its first token leaves a payload.
        """
        generation = super().release(request_id)
        if generation is not None and not generation.done and not generation.output_ids:
            # Multiplied, not zero-filled: the pages are written, so they are resident.
            self.kept[request_id] = generation, bytearray(b"\x01") * self.payload_bytes
        return generation


class UnclosedLog(RequestLog):
    """Opens a pipe with each request and closes one of its ends with it."""

    pipes: dict[str, tuple[int, int]]
    left: list[int]
    """Descriptors of requests that ended."""

    def admit(self, *generations: Generation) -> None:
        """Admit as the sound log does, and open a pipe for each request."""
        super().admit(*generations)
        for generation in generations:
            self.pipes[generation.request_id] = os.pipe()

    def release(self, request_id: str) -> Generation | None:
        """Release as the sound log does, but close only one end of the pipe."""
        if (pipe := self.pipes.pop(request_id, None)) is not None:
            reads, writes = pipe
            os.close(writes)
            self.left.append(reads)
        return super().release(request_id)


class RequestSeries(Metrics):
    """Counts the tokens of each request in a time series of its own."""

    per_request: Counter

    def ended(self, generation: Generation, reason: str) -> None:
        """Count as the sound metrics do, and in a series of the request's own."""
        super().ended(generation, reason)
        series = self.per_request.labels(self._model, generation.request_id)
        series.inc(len(generation.output_ids))


class FrontendFaults(FrontendHooks):
    """Those of the text of ``PLIMSOLL_INJECT`` that are the frontend's."""

    def __init__(self, text: str) -> None:
        self._active = [f for f in inject.parse(text) if f.process is Role.FRONTEND]
        self.names = [inject.name_of(fault) for fault in self._active]

    def tokenizer(self, sound: Tokenizer) -> Tokenizer:
        """``sound``, or a faulty one over it."""
        for fault in self._active:
            if isinstance(fault, kinds.TokenizerCache):
                return RememberingTokenizer(sound, fault.repeat)
        return sound

    def request_log(self, sound: RequestLog) -> RequestLog:
        """``sound``, which may keep from now on what it should release."""
        for fault in self._active:
            if isinstance(fault, kinds.AbortUnregistered):
                unregistered = turned(sound, UnregisteredLog)
                unregistered.payload_bytes, unregistered.kept = fault.payload_bytes, {}
            if isinstance(fault, kinds.DescriptorGrowth):
                unclosed = turned(sound, UnclosedLog)
                unclosed.pipes, unclosed.left = {}, []
        return sound

    def metrics(self, sound: Metrics) -> Metrics:
        """``sound``, which may count from now on what it should not."""
        if any(isinstance(fault, kinds.MetricLabels) for fault in self._active):
            turned(sound, RequestSeries).per_request = Counter(
                PREFIX + "request_generation_tokens",
                "Tokens generated, by request.",
                ["model_name", "request_id"],
                registry=sound.registry,
            )
        return sound
