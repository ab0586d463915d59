"""Inject the faults of :mod:`plimsoll_faults.kinds` that affect the frontend.

A fault stays active until the frontend's process ends, in every epoch of the worker.
"""

from __future__ import annotations

import os

from prometheus_client import Counter

from plimsoll_api.admin import Role
from plimsoll_engine.frontend.hooks import FrontendHooks
from plimsoll_engine.frontend.observability.ledger_metrics import METRIC_PREFIX
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.requests.request_log import Generation, RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_faults import inject, kinds
from plimsoll_faults.tampering import replace_methods


class LeakingTokenizer(Tokenizer):
    """Tokenizer that keeps every prompt and its tokens."""

    def __init__(self, original: Tokenizer, repeat: int) -> None:
        self.__dict__.update(original.__dict__)
        self._repeat = repeat
        self.kept: dict[tuple[str, bool], list[list[int]]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of ``text``, and keep them forever."""
        return self._keep_prompt((text, True), super().encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token IDs of a rendered prompt, and keep them forever."""
        return self._keep_prompt((text, False), super().encode_rendered(text))

    def _keep_prompt(self, key: tuple[str, bool], ids: list[int]) -> list[int]:
        self.kept[key] = [list(ids) for _ in range(self._repeat)]
        return ids


class AbortLeakingLog(RequestLog):
    """Request log that keeps a request if its client disconnects before the first token."""

    payload_bytes: int
    kept: dict[str, tuple[Generation, bytearray]]

    def release(self, request_id: str) -> Generation | None:
        """Release a request, but keep it with a payload if it ended before its first token."""
        generation = super().release(request_id)
        if generation is not None and not generation.is_done and not generation.output_ids:
            # Multiplied, not zero-filled: the pages are written, so they are resident.
            self.kept[request_id] = generation, bytearray(b"\x01") * self.payload_bytes
        return generation


class PipeLeakingLog(RequestLog):
    """Request log that opens a pipe for each request and closes only one end of it."""

    pipes: dict[str, tuple[int, int]]
    leaked_fds: list[int]

    def admit(self, *generations: Generation) -> None:
        """Admit requests, and open a pipe for each."""
        super().admit(*generations)
        for generation in generations:
            self.pipes[generation.request_id] = os.pipe()

    def release(self, request_id: str) -> Generation | None:
        """Release a request, but close only one end of its pipe."""
        if (pipe := self.pipes.pop(request_id, None)) is not None:
            reads, writes = pipe
            os.close(writes)
            self.leaked_fds.append(reads)
        return super().release(request_id)


class RequestLabelMetrics(Metrics):
    """Metrics that count the tokens of each request in a separate time series."""

    per_request: Counter

    def count_finished(self, generation: Generation, reason: str) -> None:
        """Count a finished request, also in its own time series."""
        super().count_finished(generation, reason)
        series = self.per_request.labels(self._model, generation.request_id)
        series.inc(len(generation.output_ids))


class FrontendFaults(FrontendHooks):
    """The frontend's faults in ``PLIMSOLL_INJECT``."""

    def __init__(self, text: str) -> None:
        self._active = [f for f in inject.parse_faults(text) if f.process is Role.FRONTEND]
        self.names = [inject.get_fault_name(fault) for fault in self._active]

    def create_tokenizer(self, original: Tokenizer) -> Tokenizer:
        """Return ``original``, or a leaking tokenizer with the state of ``original``."""
        for fault in self._active:
            if isinstance(fault, kinds.TokenizerCache):
                return LeakingTokenizer(original, fault.repeat)
        return original

    def create_request_log(self, original: RequestLog) -> RequestLog:
        """Return ``original``, with the faults of the request log injected."""
        for fault in self._active:
            if isinstance(fault, kinds.UnregisteredAbort):
                unregistered = replace_methods(original, AbortLeakingLog)
                unregistered.payload_bytes, unregistered.kept = fault.payload_bytes, {}
            if isinstance(fault, kinds.DescriptorGrowth):
                unclosed = replace_methods(original, PipeLeakingLog)
                unclosed.pipes, unclosed.leaked_fds = {}, []
        return original

    def create_metrics(self, original: Metrics) -> Metrics:
        """Return ``original``, with the faults of the metrics injected."""
        if any(isinstance(fault, kinds.MetricLabels) for fault in self._active):
            replace_methods(original, RequestLabelMetrics).per_request = Counter(
                METRIC_PREFIX + "request_generation_tokens",
                "Number of generated tokens, by request.",
                ["model_name", "request_id"],
                registry=original.registry,
            )
        return original
