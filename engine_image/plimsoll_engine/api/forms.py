"""A multipart body, at most so much of it, in memory alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from plimsoll_engine.api import body as bodies
from plimsoll_engine.api.errors import ApiError, invalid

MAX_FIELDS = 16


async def read(request: Request, limit: int) -> tuple[bytes, dict[str, str]]:
    """The content of the field ``file`` and the other fields. Raises ApiError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise invalid("send multipart/form-data with the fields file and model")
    try:
        raw = await bodies.read(request, limit)
    except bodies.TooLarge as error:
        raise ApiError(413, str(error), code="body_too_large") from None

    async def whole() -> AsyncGenerator[bytes, None]:
        yield raw
        yield b""

    parser = MultiPartParser(request.headers, whole(), max_files=1, max_fields=MAX_FIELDS)
    parser.spool_max_size = limit  # never on a disk: the container's may be read-only
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the multipart body is malformed: {error.message}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise invalid("the field file is missing: it holds the sound", "file", "missing_field")
        content = await file.read()
    finally:
        await form.close()
    return content, {name: value for name, value in form.items() if isinstance(value, str)}
