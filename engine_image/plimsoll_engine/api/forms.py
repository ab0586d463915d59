"""Parse multipart forms in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from plimsoll_engine.api.errors import make_invalid_error

MAX_FORM_FIELDS = 16
_CHARSET_PATTERN = re.compile(r';\s*charset\s*=\s*("[^"]*"|[^;]*)', re.IGNORECASE)


class Form(msgspec.Struct):
    """Content of the form field ``file``, and the values of the other form fields."""

    file: bytes
    fields: dict[str, str]


async def parse_form(raw: bytes | bytearray, content_type: str) -> Form:
    """Return the file and the other fields of the multipart body ``raw``. Raises ApiError."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise make_invalid_error(
            f"content-type {content_type[:64]!r} is not supported: send multipart/form-data with "
            "the fields file and model"
        )

    async def yield_body() -> AsyncGenerator[bytes, None]:
        yield bytes(raw)
        yield b""

    # A form is UTF-8 (RFC 7578). Other charsets would have any of Python's codecs decode the names
    # and values, also into text that no message can carry.
    headers = Headers({"content-type": _CHARSET_PATTERN.sub("", content_type)})
    parser = MultiPartParser(headers, yield_body(), max_files=1, max_fields=MAX_FORM_FIELDS)
    parser.spool_max_size = len(raw) + 1  # never spool to disk, which may be read-only
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise make_invalid_error(f"the multipart body is malformed: {error.message}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise make_invalid_error(
                "the field file is missing: send the audio file", "file", "missing_field"
            )
        content = await file.read()
    finally:
        await form.close()
    return Form(content, {name: value for name, value in form.items() if isinstance(value, str)})
