"""The faults of :mod:`plimsoll_engine.fault_kinds` that are the frontend's. They last as long as
its process, whatever the worker's epoch. Nothing here runs without ``PLIMSOLL_INJECT``."""

from __future__ import annotations

from plimsoll_api.admin import Role
from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine import inject
from plimsoll_engine.frontend.requests import Generation, RequestLog
from plimsoll_engine.frontend.tokenizer import Tokenizer


class RememberingTokenizer(Tokenizer):
    """Keeps every prompt and its tokens."""

    def __init__(self, sound: Tokenizer, repeat: int) -> None:
        self.__dict__.update(sound.__dict__)
        self._repeat = repeat
        self.kept: dict[tuple[str, bool], list[list[int]]] = {}

    def encode(self, text: str) -> list[int]:
        return self._keep((text, True), super().encode(text))

    def encode_rendered(self, text: str) -> list[int]:
        return self._keep((text, False), super().encode_rendered(text))

    def _keep(self, key: tuple[str, bool], ids: list[int]) -> list[int]:
        self.kept[key] = [list(ids) for _ in range(self._repeat)]
        return ids


class UnregisteredLog(RequestLog):
    """Keeps the state of a request whose client left before its first token."""

    def __init__(self, capacity: int, payload_bytes: int) -> None:
        super().__init__(capacity)
        self._payload_bytes = payload_bytes
        self.kept: dict[str, tuple[Generation, bytearray]] = {}

    def release(self, request_id: str) -> Generation | None:
        generation = super().release(request_id)
        if generation is not None and not generation.done and not generation.output_ids:
            # Multiplied, not zero-filled: the pages are written, so they are resident.
            self.kept[request_id] = generation, bytearray(b"\x01") * self._payload_bytes
        return generation


class FrontendFaults:
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

    def request_log(self, capacity: int) -> RequestLog:
        for fault in self._active:
            if isinstance(fault, kinds.AbortUnregistered):
                return UnregisteredLog(capacity, fault.payload_bytes)
        return RequestLog(capacity)
