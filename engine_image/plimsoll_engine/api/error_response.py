"""Convert API errors to HTTP responses."""

from __future__ import annotations

from starlette.responses import Response

from plimsoll_engine.api.errors import ApiError


def make_error_response(error: ApiError) -> Response:
    """Return ``error`` as a response. Its headers tell clients whether to retry."""
    return Response(
        error.encode_body(),
        error.status,
        headers=error.make_headers(),
        media_type="application/json",
    )
