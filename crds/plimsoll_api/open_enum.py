"""Words of one part that another part reads, which may be older.

Parts of one installation have different versions: an upgrade of the operator restarts no pod, and
each pod keeps the supervisor and the engine that it was made with. So a reader must expect words
that it does not know. It reads such a word as it is, and no branch takes it for another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Self

import msgspec

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")


class OpenEnum(StrEnum):
    """An enumeration to which later versions may add.

    A word that this version does not know keeps its text, equals no member and is none of
    ``list(...)``; ``is_known`` tells it apart. Anything but a short plain word is refused, with
    ValueError, or msgspec's error where msgspec reads it.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word

    @property
    def is_known(self) -> bool:
        """Whether this version has the word."""
        return self.value in type(self)._value2member_map_


def unknown_words(value: object) -> Iterator[OpenEnum]:
    """Yield the words within ``value`` that this version does not know.

    ``value`` is a struct, or a container of structs.
    """
    if isinstance(value, OpenEnum):
        if not value.is_known:
            yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from unknown_words(getattr(value, name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from unknown_words(key)
            yield from unknown_words(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from unknown_words(one)
