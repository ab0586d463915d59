"""Decodes untrusted JSON: one function, one error, and a limit on the depth.

Engines, other pods, files in shared volumes and the API server all send JSON. msgspec alone raises
three unrelated exceptions for bad input. A caller that forgets one of them would let a page end the
process.
"""

from __future__ import annotations

import threading
from array import array
from itertools import accumulate
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")

MAX_DEPTH = 64
"""Maximum nesting of arrays and objects. Ours and Kubernetes' have fewer than 20 levels. Beyond a
few hundred, the decoder's own recursion depends on the remaining stack of the calling thread."""

MAX_DECODE_ERROR = 500
"""Maximum length of an error, in characters: it quotes the unexpected value, which may have
megabytes."""

_BRACKETS, _STEPS = b"[{]}", bytes((1, 1, 255, 255))
_STEP_OF = bytes.maketrans(_BRACKETS, _STEPS)
_OTHER = bytes(set(range(256)) - set(_BRACKETS + b'"'))
_PIECE = 1 << 16


class Malformed(ValueError):
    """Data that is not JSON of the expected type. The message says why."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()
"""Guards msgspec's inspection of a type at its first use, which crashes if two threads do it at
once."""


@overload
def decode(data: bytes, kind: type[_T]) -> _T: ...
@overload
def decode(data: bytes, kind: Any) -> Any: ...  # an annotated type
def decode(data: bytes, kind: Any) -> Any:
    """Return ``data`` as a ``kind``. Raises :class:`Malformed` if it is anything else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    if is_deeper(data, MAX_DEPTH):
        raise Malformed(f"JSON is nested more than {MAX_DEPTH} levels deep")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise Malformed(str(error)[:MAX_DECODE_ERROR]) from error


def is_deeper(data: bytes, limit: int) -> bool:
    """Report whether arrays and objects are nested more than ``limit`` deep, in linear time.

    For text that is not JSON, the result is arbitrary: the decoder refuses it anyway.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER)
    depth, in_string = 0, False
    for at in range(0, len(plain), _PIECE):
        texts = plain[at : at + _PIECE].split(b'"')
        brackets = b"".join(texts[in_string::2])
        in_string ^= len(texts) % 2 == 0
        for level in accumulate(array("b", brackets.translate(_STEP_OF)), initial=depth):
            if level > limit:
                return True
            depth = level
    return False
