"""Parse multipart forms in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from plimsoll_engine.api.errors import invalid

MAX_FIELDS = 16


class Form(msgspec.Struct):
    """Content of the field ``file``, and the values of the other fields."""

    file: bytes
    fields: dict[str, str]


async def parse(raw: bytes | bytearray, content_type: str) -> Form:
    """Return the file and the other fields of a form. Raises ApiError."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise invalid(
            f"content-type {content_type[:64]!r} is not supported: send multipart/form-data with "
            "the fields file and model"
        )

    async def whole() -> AsyncGenerator[bytes, None]:
        yield bytes(raw)
        yield b""

    headers = Headers({"content-type": content_type})
    parser = MultiPartParser(headers, whole(), max_files=1, max_fields=MAX_FIELDS)
    parser.spool_max_size = len(raw) + 1  # never spool to disk, which may be read-only
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the multipart body is malformed: {error.message}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise invalid("the field file is missing: send the audio file", "file", "missing_field")
        content = await file.read()
    finally:
        await form.close()
    return Form(content, {name: value for name, value in form.items() if isinstance(value, str)})
