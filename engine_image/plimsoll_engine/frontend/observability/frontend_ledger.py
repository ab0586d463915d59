"""Ledger of the frontend's own memory."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.admin import LedgerEntry, MemoryKind, Role
from plimsoll_engine.caches.processor_cache import ProcessorCache
from plimsoll_engine.frontend.requests.request_log import RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer


class FrontendLedger:
    """Ledger of the frontend's memory, which counts the bytes at each call."""

    def __init__(self, requests: RequestLog, tokenizer: Tokenizer, media: ProcessorCache) -> None:
        self._requests = requests
        self._media = media
        self._tokenizer_bytes = tokenizer.file_bytes
        self._more: list[tuple[str, Callable[[], int], Callable[[], int] | None]] = []

    def register(
        self,
        owner: str,
        count_bytes: Callable[[], int],
        get_max_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Add an owner of host memory, with functions that return its bytes and its bound."""
        self._more.append((owner, count_bytes, get_max_bytes))

    def list_entries(self) -> list[LedgerEntry]:
        """Return the frontend's ledger entries, in bytes."""
        return [
            LedgerEntry(
                owner="request_log",
                kind=MemoryKind.HOST,
                bytes=self._requests.count_bytes(),
                process=Role.FRONTEND,
            ),
            LedgerEntry(
                owner="request_media",
                kind=MemoryKind.HOST,
                bytes=self._requests.count_media_bytes(),
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
            *(
                LedgerEntry(
                    owner=owner,
                    kind=MemoryKind.HOST,
                    bytes=count(),
                    bound=None if bound is None else bound(),
                    process=Role.FRONTEND,
                )
                for owner, count, bound in self._more
            ),
        ]
