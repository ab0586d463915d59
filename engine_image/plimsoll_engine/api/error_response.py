"""An error as an HTTP response. Apart from the errors: the preparing process has no server."""

from __future__ import annotations

from starlette.responses import Response

from plimsoll_engine.api.errors import ApiError


def error_response(error: ApiError) -> Response:
    """Return the error in OpenAI's JSON.

    Its headers tell a client whether to try again.
    """
    return Response(
        error.body(), error.status, headers=error.headers(), media_type="application/json"
    )
