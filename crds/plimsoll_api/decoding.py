"""Decode untrusted JSON with one function, one exception and a maximum depth."""

from __future__ import annotations

import threading
from array import array
from itertools import accumulate
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")

MAX_DEPTH = 64
"""Maximum nesting of arrays and objects. The documents of Plimsoll and Kubernetes have fewer
than 20 levels."""

MAX_DECODE_ERROR_CHARS = 500
"""Maximum length of an error message, which quotes the unexpected value."""

_BRACKETS, _STEPS = b"[{]}", bytes((1, 1, 255, 255))
_DEPTH_STEPS = bytes.maketrans(_BRACKETS, _STEPS)
_IRRELEVANT_BYTES = bytes(set(range(256)) - set(_BRACKETS + b'"'))
_PIECE_BYTES = 1 << 16


class MalformedError(ValueError):
    """Raised for data that is not JSON of the expected type; the message says why."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()
"""Lock for the creation of decoders; msgspec crashes if two threads inspect the same type."""


@overload
def decode(data: bytes, kind: type[_T]) -> _T: ...
@overload
def decode(data: bytes, kind: Any) -> Any: ...  # an annotated type
def decode(data: bytes, kind: Any) -> Any:
    """Decode ``data`` as a ``kind``. Raises :class:`MalformedError` if that fails."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    if is_nested_deeper(data, MAX_DEPTH):
        raise MalformedError(f"the JSON is nested more than {MAX_DEPTH} levels deep")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise MalformedError(str(error)[:MAX_DECODE_ERROR_CHARS]) from error


def is_nested_deeper(data: bytes, limit: int) -> bool:
    """Report whether arrays and objects are nested more than ``limit`` levels deep.

    If ``data`` is not JSON, the result has no meaning.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _IRRELEVANT_BYTES)
    depth, in_string = 0, False
    for at in range(0, len(plain), _PIECE_BYTES):
        texts = plain[at : at + _PIECE_BYTES].split(b'"')
        brackets = b"".join(texts[in_string::2])
        in_string ^= len(texts) % 2 == 0
        for level in accumulate(array("b", brackets.translate(_DEPTH_STEPS)), initial=depth):
            if level > limit:
                return True
            depth = level
    return False
