"""The optional API keys of ``/v1``: one a line in a mounted file (``--api-key-file``).

The file is read again when it changes, so that a key is rotated without a restart; while it cannot
be read or names no key, the last keys hold.
"""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from plimsoll_engine.api.error_response import error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.secret import Secret
from plimsoll_engine.errors import UsageError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
TENANT = "plimsoll.tenant"
"""The scope's key for whom a request is of: set where several keys tell tenants apart."""


class ApiKeys:
    """The keys in ``file``; UsageError where there are none at the start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._keys: list[Secret] = []
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {file}: cannot be read: {error}") from None
        if not self._keys:
            raise UsageError(f"--api-key-file {file}: no key in it; write one a line")

    def tenant(self, authorization: bytes) -> str | None:
        """Whose key it is, empty where there is only one; None for no key of ours.

        Takes the same time wherever the key is wrong, and however long it is.
        """
        self._refresh()
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() == b"bearer":  # its case means nothing (RFC 9110, section 11.1)
            authorization = b"Bearer " + given.strip()
        found = None
        for number, key in enumerate(self._keys, 1):
            if key.equals(authorization):
                found = f"key {number}"
        return "" if found is not None and len(self._keys) == 1 else found

    def _refresh(self) -> None:
        try:
            self._read()
        except (OSError, ValueError) as error:
            log.warning("could not reload the API keys", extra={"reason": str(error)})

    def _read(self) -> None:
        status = self._file.stat()
        stamp = status.st_mtime_ns, status.st_ino
        if stamp == self._stamp:
            return
        lines = self._file.read_text(encoding="ascii").splitlines()
        self._stamp = stamp
        keys = [Secret(b"Bearer " + line.strip().encode()) for line in lines if line.strip()]
        self._keys = keys or self._keys


class Guard:
    """Answers 401 to a request without a key; lets probes and metrics through."""

    def __init__(self, inner: ASGIApp, keys: ApiKeys) -> None:
        self._inner = inner
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through whose key is known or whose path is open.

        Its tenant is in the scope.
        """
        # A browser asks with OPTIONS and without a key whether it may send a request.
        asks = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if asks and scope["path"] not in OPEN_PATHS:
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            tenant = self._keys.tenant(given)
            if tenant is None:
                error = ApiError(
                    401, "the API key is missing or wrong: send it as a bearer token",
                    code="invalid_api_key",
                )  # fmt: skip
                await error_response(error)(scope, receive, send)
                return
            scope[TENANT] = tenant
        await self._inner(scope, receive, send)
