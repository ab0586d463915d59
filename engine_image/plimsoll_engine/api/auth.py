"""API keys of ``/v1``: one per line in a mounted file (``--api-key-file``).

A changed file is read again, so a key can be rotated without a restart.
"""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from plimsoll_engine.api.error_response import make_error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.secret import Secret
from plimsoll_engine.errors import UsageError

log = logging.getLogger(__name__)

# These paths need no API key.
UNAUTHENTICATED_PATHS = frozenset({"/health", "/ready", "/metrics"})
# Key of the tenant in a request's ASGI scope, set only with several API keys.
TENANT_SCOPE_KEY = "plimsoll.tenant"


class ApiKeys:
    """API keys in ``file``. The constructor raises UsageError if the file has no keys."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._keys: list[Secret] = []
        try:
            self._read_keys()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the file {file} (--api-key-file): {error}") from None
        if not self._keys:
            raise UsageError(
                f"the file {file} (--api-key-file) has no keys: write one key per line"
            )

    def get_tenant(self, authorization: bytes) -> str | None:
        """Return the tenant of an API key in constant time; None if the key is invalid.

        Return "" if the file has only one key.
        """
        self._reload_if_changed()
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() == b"bearer":  # case-insensitive (RFC 9110, section 11.1)
            authorization = b"Bearer " + token.strip()
        tenant = None
        for number, key in enumerate(self._keys, 1):
            if key.is_equal(authorization):
                tenant = f"key {number}"
        return "" if tenant is not None and len(self._keys) == 1 else tenant

    def _reload_if_changed(self) -> None:
        try:
            self._read_keys()
        except (OSError, ValueError) as error:
            log.warning(
                "failed to reload --api-key-file; the previous API keys stay valid",
                extra={"file": str(self._file), "reason": str(error)},
            )

    def _read_keys(self) -> None:
        status = self._file.stat()
        stamp = status.st_mtime_ns, status.st_ino
        if stamp == self._stamp:
            return
        lines = self._file.read_text(encoding="ascii").splitlines()
        self._stamp = stamp
        keys = [Secret(b"Bearer " + line.strip().encode()) for line in lines if line.strip()]
        self._keys = keys or self._keys


class ApiKeyMiddleware:
    """ASGI middleware that answers status 401 to requests without a valid key."""

    def __init__(self, inner: ASGIApp, keys: ApiKeys) -> None:
        self._inner = inner
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application if the key is valid or not required. Add the tenant to the scope."""
        # Browsers send CORS preflight requests (OPTIONS) without a key.
        needs_key = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if needs_key and scope["path"] not in UNAUTHENTICATED_PATHS:
            token = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            tenant = self._keys.get_tenant(token)
            if tenant is None:
                error = ApiError(
                    401, "the API key is missing or invalid: send it as a bearer token",
                    code="invalid_api_key",
                )  # fmt: skip
                await make_error_response(error)(scope, receive, send)
                return
            scope[TENANT_SCOPE_KEY] = tenant
        await self._inner(scope, receive, send)
