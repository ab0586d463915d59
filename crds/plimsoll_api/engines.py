"""Define the supported engines, and the flags of each that Plimsoll uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from plimsoll_api.cel import rule


class EngineType(StrEnum):
    """Engine type of a replica, which determines how the engine is drained and restarted."""

    PLIMSOLL = "plimsoll"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


KEYS_FLAG = "--api-key-file"
_OURS = (EngineType.PLIMSOLL,)
_KNOWN = (EngineType.PLIMSOLL, EngineType.VLLM, EngineType.SGLANG)


class ReservedFlag(NamedTuple):
    """Reserved flag. ``instead`` says what to use in its place."""

    flag: str
    types: tuple[EngineType, ...]
    instead: str


RESERVED_FLAGS = (
    ReservedFlag("--model", _KNOWN, "set model.uri"),
    ReservedFlag("--model-path", (EngineType.SGLANG,), "set model.uri"),
    ReservedFlag("--served-model-name", _KNOWN, "set model.servedName"),
    ReservedFlag("--port", _KNOWN, "set engine.port"),
    ReservedFlag("--admin-port", _OURS, "the operator sets it"),
    ReservedFlag("--run-dir", _OURS, "the operator sets it"),
    ReservedFlag("--startup-timeout", _OURS, "set engine.startupTimeout"),
    ReservedFlag(KEYS_FLAG, _OURS, "engine.apiKeySecretRef sets it"),
)
"""Flags that the operator sets. A second value in ``engine.args`` would take precedence, and
probes, the Service and the supervisor would use a wrong address. The last flag is reserved only if
``apiKeySecretRef`` is set."""


TLS_FLAG = "--ssl-certfile"
"""Flag that makes vLLM and SGLang serve only HTTPS (an option of uvicorn)."""


def scheme(type_: EngineType, args: Sequence[str]) -> Literal["http", "https"]:
    """Return the URL scheme of an engine with these arguments."""
    external = type_ in (EngineType.VLLM, EngineType.SGLANG)
    pattern = re.compile(_pattern(TLS_FLAG).replace("$", r"\Z"))
    return "https" if external and any(pattern.match(one) for one in args) else "http"


def _pattern(flag: str) -> str:
    """Return a pattern, for RE2 and Python, that matches ``flag`` with dashes or underscores."""
    return f"^--{flag.removeprefix('--').replace('-', '[-_]')}(=|$)"


def _message(one: ReservedFlag) -> str:
    return f"engine.args must not have {one.flag}: {one.instead}"


def refusal(type_: EngineType, args: Sequence[str], keys: bool) -> str | None:
    """Return why an engine must not have ``args``; None if they are allowed.

    ``keys`` states whether ``apiKeySecretRef`` is set.
    """
    for one in RESERVED_FLAGS:
        if type_ in one.types and (keys or one.flag != KEYS_FLAG):
            pattern = re.compile(_pattern(one.flag).replace("$", r"\Z"))
            if any(pattern.match(argument) for argument in args):
                return _message(one)
    return None


def _rule(one: ReservedFlag) -> dict[str, str]:
    types = [str(type_) for type_ in one.types]
    # CEL checks an object's default before the defaults of its fields are set.
    free = f"!has(self.args) || !(self.?type.orValue('plimsoll') in {types})"
    if one.flag == KEYS_FLAG:
        free += " || !has(self.apiKeySecretRef)"
    found = f"!self.args.exists(a, a.matches('{_pattern(one.flag)}'))"
    return rule(f"{free} || {found}", _message(one), fieldPath=".args")


FLAG_RULES = tuple(_rule(one) for one in RESERVED_FLAGS)
"""CEL rules on ``spec.engine`` that match :func:`refusal`."""
