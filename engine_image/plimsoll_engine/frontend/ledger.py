"""What the frontend itself holds, beside the worker's ledger."""

from __future__ import annotations

from plimsoll_api.admin import LedgerEntry, MemoryKind, Role
from plimsoll_engine.caches.processor import ProcessorCache
from plimsoll_engine.frontend.requests import RequestLog
from plimsoll_engine.frontend.tokenizer import Tokenizer


class FrontendLedger:
    """Owners of frontend memory, counted when asked."""

    def __init__(self, requests: RequestLog, tokenizer: Tokenizer, media: ProcessorCache) -> None:
        self._requests = requests
        self._media = media
        self._tokenizer_bytes = tokenizer.file_bytes

    def entries(self) -> list[LedgerEntry]:
        return [
            LedgerEntry(
                owner="request_log",
                kind=MemoryKind.HOST,
                bytes=self._requests.bytes(),
                process=Role.FRONTEND,
            ),
            LedgerEntry(
                owner="request_media",
                kind=MemoryKind.HOST,
                bytes=self._requests.media_bytes(),
                process=Role.FRONTEND,
            ),
            LedgerEntry(
                owner="tokenizer",
                kind=MemoryKind.HOST,
                bytes=self._tokenizer_bytes,
                bound=self._tokenizer_bytes,
                process=Role.FRONTEND,
            ),
            LedgerEntry(
                owner="processor_cache",
                kind=MemoryKind.HOST,
                bytes=self._media.nbytes,
                bound=self._media.capacity,
                process=Role.FRONTEND,
            ),
        ]
