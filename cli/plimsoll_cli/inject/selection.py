"""Which documents of a file are injected: by name, and by label selectors as kubectl takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll_cli.errors import UsageError

Labels = Mapping[str, str]
Requirement = Callable[[Labels], bool]

_KEY = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"(?P<key>{_KEY})\s*(?P<sign>==|=|!=)\s*(?P<value>{_VALUE})")
_SET = re.compile(rf"(?P<key>{_KEY})\s+(?P<sign>in|notin)\s*\((?P<values>[^()]*)\)")
_EXISTS = re.compile(rf"(?P<sign>!?)\s*(?P<key>{_KEY})")
_COMMA = re.compile(r",(?![^(]*\))")
"""A comma that separates requirements, and not the values of a set."""


@dataclass(frozen=True)
class Selection:
    """Documents that have one of ``names``, if any are given, and meet all ``requirements``."""

    names: frozenset[str] = frozenset()
    requirements: tuple[Requirement, ...] = ()

    def takes(self, document: Mapping[str, Any]) -> bool:
        """Return whether ``document`` is chosen, by its own name and labels."""
        metadata = document.get("metadata")
        if not isinstance(metadata, Mapping):
            metadata = {}
        labels = metadata.get("labels")
        held = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {}
        named = not self.names or metadata.get("name") in self.names
        return named and all(meets(held) for meets in self.requirements)


def parse(selector: str) -> tuple[Requirement, ...]:
    """Return the requirements of a label selector such as ``app=vllm,tier in (a,b),!canary``.

    The syntax is that of the Kubernetes API. UsageError names a requirement that has another form.
    """
    return tuple(_requirement(part.strip()) for part in _COMMA.split(selector))


def _requirement(text: str) -> Requirement:
    if (found := _EQUALITY.fullmatch(text)) is not None:
        return _one_of(found["key"], {found["value"]}, negated=found["sign"] == "!=")
    if (found := _SET.fullmatch(text)) is not None:
        values = {value.strip() for value in found["values"].split(",")}
        return _one_of(found["key"], values, negated=found["sign"] == "notin")
    if (found := _EXISTS.fullmatch(text)) is not None:
        key, absent = found["key"], found["sign"] == "!"
        return lambda labels: (key in labels) is not absent
    raise UsageError(f"--selector: {text!r} is not a label requirement; write for example app=vllm")


def _one_of(key: str, values: set[str], negated: bool) -> Requirement:
    """Require that a label has one of ``values``, or with ``negated`` none of them.

    As in the Kubernetes API, a negated requirement also takes objects without the label.
    """
    return lambda labels: ((key in labels) and labels[key] in values) is not negated
