"""The answers of ``/tokenize`` and ``/detokenize``, with vLLM's bodies."""

from __future__ import annotations

from starlette.responses import Response

from plimsoll_engine.api.batch import check_model
from plimsoll_engine.api.prepare import Text
from plimsoll_engine.frontend.async_engine import AsyncEngine


def answer(engine: AsyncEngine, text: Text) -> Response:
    """Raises ApiError."""
    if text.model is not None:
        check_model(engine, text.model)
    return Response(text.answer, media_type="application/json")
