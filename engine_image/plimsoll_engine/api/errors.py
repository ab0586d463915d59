"""Errors of the serving API in OpenAI's format, with stable types and codes."""

from __future__ import annotations

import msgspec

from plimsoll_engine.frontend.async_engine import NotServingError
from plimsoll_engine.frontend.requests.request_log import QueueFullError, RequestFailedError
from plimsoll_engine.process.addresses import remove_addresses

RETRY_AFTER_S = 1


class ApiError(Exception):
    """Error response of the serving API. ``param`` names the invalid field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        should_retry: bool = False,
    ) -> None:
        super().__init__(remove_addresses(message))
        self.status = status
        self.param = param
        self.code = code
        self.retry = should_retry

    @property
    def error_type(self) -> str:
        """OpenAI's error type for the HTTP status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 404:
            return "not_found_error"
        if self.status in (408, 504):
            return "timeout_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def encode_body(self) -> bytes:
        """Return OpenAI's error object as JSON."""
        error = {
            "message": str(self),
            "type": self.error_type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def make_headers(self) -> dict[str, str]:
        """Return the headers that tell clients whether to retry, such as ``retry-after``."""
        if self.status == 504:  # OpenAI's clients would retry, but the deadline has passed
            return {"x-should-retry": "false"}
        return {"retry-after": str(RETRY_AFTER_S)} if self.retry else {}


def make_invalid_error(
    message: str, param: str | None = None, code: str = "invalid_value"
) -> ApiError:
    """Return an error with status 400 for the request field ``param``."""
    return ApiError(400, message, param=param, code=code)


def convert_exception(error: Exception) -> ApiError:
    """Return the API error for an exception of the engine or of a failed request."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", should_retry=True)
        case NotServingError():
            return ApiError(503, str(error), code="not_serving", should_retry=True)
        case RequestFailedError(reason="invalid", param=param):
            return ApiError(400, str(error), param=param, code="invalid_request")
        case RequestFailedError(reason="deadline"):
            return ApiError(504, str(error), param="deadline_s", code="deadline_exceeded")
        case RequestFailedError(reason="unavailable"):
            return ApiError(503, str(error), code="unavailable", should_retry=True)
    return ApiError(500, str(error), code="internal_error")
