"""Define the supported engines, and the flags of each that Plimsoll uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from plimsoll_api.cel import make_rule


class EngineType(StrEnum):
    """Engine type of a replica, which determines how the engine is drained and restarted."""

    PLIMSOLL = "plimsoll"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


API_KEYS_FLAG = "--api-key-file"
_PLIMSOLL_ONLY = (EngineType.PLIMSOLL,)
_KNOWN_TYPES = (EngineType.PLIMSOLL, EngineType.VLLM, EngineType.SGLANG)


class ReservedFlag(NamedTuple):
    """Flag that ``engine.args`` must not set; ``alternative`` says what to do instead."""

    flag: str
    types: tuple[EngineType, ...]
    alternative: str


RESERVED_FLAGS = (
    ReservedFlag("--model", _KNOWN_TYPES, "set model.uri"),
    ReservedFlag("--model-path", (EngineType.SGLANG,), "set model.uri"),
    ReservedFlag("--served-model-name", _KNOWN_TYPES, "set model.servedName"),
    ReservedFlag("--port", _KNOWN_TYPES, "set engine.port"),
    ReservedFlag("--admin-port", _PLIMSOLL_ONLY, "the operator sets it"),
    ReservedFlag("--run-dir", _PLIMSOLL_ONLY, "the operator sets it"),
    ReservedFlag("--startup-timeout", _PLIMSOLL_ONLY, "set engine.startupTimeout"),
    ReservedFlag(API_KEYS_FLAG, _PLIMSOLL_ONLY, "engine.apiKeySecretRef sets it"),
)
"""Flags that the operator sets; :data:`API_KEYS_FLAG` is reserved only with ``apiKeySecretRef``."""


TLS_FLAG = "--ssl-certfile"
"""Flag that makes vLLM and SGLang serve only HTTPS (an option of uvicorn)."""


def find_url_scheme(type_: EngineType, args: Sequence[str]) -> Literal["http", "https"]:
    """Return the URL scheme of an engine with these arguments."""
    external = type_ in (EngineType.VLLM, EngineType.SGLANG)
    pattern = re.compile(_make_flag_pattern(TLS_FLAG).replace("$", r"\Z"))
    return "https" if external and any(pattern.match(one) for one in args) else "http"


# For RE2 and Python. The flag may have dashes or underscores.
def _make_flag_pattern(flag: str) -> str:
    return f"^--{flag.removeprefix('--').replace('-', '[-_]')}(=|$)"


def _format_refused_flag(reserved: ReservedFlag) -> str:
    return f"engine.args must not contain {reserved.flag}: {reserved.alternative}"


def explain_refused_args(
    type_: EngineType, args: Sequence[str], has_api_key_secret: bool
) -> str | None:
    """Return why ``args`` are not allowed for an engine of this type; None if they are allowed."""
    for one in RESERVED_FLAGS:
        if type_ in one.types and (has_api_key_secret or one.flag != API_KEYS_FLAG):
            pattern = re.compile(_make_flag_pattern(one.flag).replace("$", r"\Z"))
            if any(pattern.match(argument) for argument in args):
                return _format_refused_flag(one)
    return None


def _make_flag_rule(reserved: ReservedFlag) -> dict[str, str]:
    types = [str(type_) for type_ in reserved.types]
    # CEL checks an object's default before the defaults of its fields are set.
    free = f"!has(self.args) || !(self.?type.orValue('plimsoll') in {types})"
    if reserved.flag == API_KEYS_FLAG:
        free += " || !has(self.apiKeySecretRef)"
    found = f"!self.args.exists(a, a.matches('{_make_flag_pattern(reserved.flag)}'))"
    return make_rule(f"{free} || {found}", _format_refused_flag(reserved), fieldPath=".args")


FLAG_RULES = tuple(_make_flag_rule(one) for one in RESERVED_FLAGS)
"""CEL rules on ``spec.engine`` that reject the same arguments as :func:`explain_refused_args`."""
