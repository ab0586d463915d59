"""Enumerations that accept values of later versions.

The parts of an installation may have different versions, because an upgrade of the operator
restarts no pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Self

import msgspec

_WORD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")


class OpenEnum(StrEnum):
    """Enumeration that later versions may extend.

    A value of a later version becomes an instance that is not a member. Text that is not a short
    plain word raises ValueError, or msgspec's error in a decoder.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or not _WORD_PATTERN.fullmatch(value):
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word

    @property
    def is_known(self) -> bool:
        """Whether this version knows the value."""
        return self.value in type(self)._value2member_map_


def iterate_unknown_values(value: object) -> Iterator[OpenEnum]:
    """Yield the values in ``value``, a struct or a container, that this version does not know."""
    if isinstance(value, OpenEnum):
        if not value.is_known:
            yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from iterate_unknown_values(getattr(value, name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from iterate_unknown_values(key)
            yield from iterate_unknown_values(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from iterate_unknown_values(one)
