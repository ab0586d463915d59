"""Read YAML scalars as kubectl does, and write YAML that all parsers read the same way.

kubectl uses sigs.k8s.io/yaml, which differs from both versions of YAML: ``y`` and ``on`` are
booleans, ``0o17`` is a number, and ``22:30`` is a string.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import yaml


class YamlError(ValueError):
    """Raised for text that kubectl rejects, or that exceeds a limit.

    ``position`` is the line and column of the problem; None if unknown.
    """

    def __init__(self, problem: str, position: tuple[int, int] | None = None) -> None:
        super().__init__(problem)
        self.position = position


_INFINITY_SPELLINGS = (".inf", ".Inf", ".INF")


def _list_spellings(*words: str) -> list[str]:
    return [form for word in words for form in (word, word.capitalize(), word.upper())]


YAML_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(_list_spellings("y", "yes", "true", "on"), True),
    **dict.fromkeys(_list_spellings("n", "no", "false", "off"), False),
    **dict.fromkeys(["", "~", *_list_spellings("null")], None),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
    **dict.fromkeys([sign + word for sign in ("", "+") for word in _INFINITY_SPELLINGS], math.inf),
    **dict.fromkeys(["-" + word for word in _INFINITY_SPELLINGS], -math.inf),
}
"""Values of the unquoted words that sigs.k8s.io/yaml reads as constants."""
INTEGER_PATTERN = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)|0[oO]?(?P<oct>[0-7]+)"
    r"|(?P<dec>0|[1-9][0-9]*))"
)
INTEGER_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
FLOAT_PATTERN = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
FRACTION_PATTERN = re.compile(r"\.[0-9](_?[0-9])*([eE][-+]?[0-9](_?[0-9])*)?")
MAX_NUMBER_CHARS = 4096
"""Maximum length of a number, because parsing takes quadratic time."""
MAX_INTEGER_KEY = (1 << 63) - 1
"""Largest integer that sigs.k8s.io/yaml accepts as a key."""
TAG_PREFIX = "tag:yaml.org,2002:"
TAG_CHECKS: dict[str, Callable[[Any], bool]] = {
    f"{TAG_PREFIX}bool": lambda value: isinstance(value, bool),
    f"{TAG_PREFIX}int": lambda value: type(value) is int,
    f"{TAG_PREFIX}float": lambda value: (
        isinstance(value, float)
        or (type(value) is int and -MAX_INTEGER_KEY <= value + 1 <= MAX_INTEGER_KEY + 1)
    ),
    f"{TAG_PREFIX}null": lambda value: value is None,
    f"{TAG_PREFIX}timestamp": lambda value: isinstance(value, str),
}


def parse_plain_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar."""
    first = text[:1]
    if text in YAML_CONSTANTS and (not first or first in "yYnNtTfFoO~.+-"):
        return YAML_CONSTANTS[text]
    if first == ".":
        return (
            _parse_float(text.replace("_", ""), text) if FRACTION_PATTERN.fullmatch(text) else text
        )
    if not first or first not in "+-0123456789" or len(text) > MAX_NUMBER_CHARS:
        return text
    digits = text.replace("_", "")
    if (found := INTEGER_PATTERN.fullmatch(digits)) is not None:
        base = next(name for name in INTEGER_BASES if found[name] is not None)
        number = (
            int(found["sign"] + found[base], INTEGER_BASES[base]) if len(digits) <= 80 else 1 << 64
        )
        unsigned = number < 1 << 64 and not found["sign"]
        if -(1 << 63) <= number < 1 << 63 or unsigned:
            return number
    return _parse_float(digits, text) if FLOAT_PATTERN.fullmatch(digits) else text


def _parse_float(digits: str, text: str) -> Any:
    number = float(digits)
    return text if math.isinf(number) else number


def parse_scalar(tag: str | None, text: str, unquoted: bool) -> Any:
    """Return the value of a scalar. Raises YamlError if kubectl rejects it."""
    if tag is None:
        return parse_plain_scalar(text) if unquoted else text
    if tag == f"{TAG_PREFIX}binary":
        try:
            return base64.b64decode(text, validate=False).decode("utf-8", "replace")
        except binascii.Error:
            raise YamlError("the value of !!binary is not valid base64") from None
    if tag not in TAG_CHECKS:
        return text
    value = parse_plain_scalar(text)
    if not TAG_CHECKS[tag](value):
        raise YamlError(f"{text[:40]!r} cannot be decoded as {tag.replace(TAG_PREFIX, '!!')}")
    return value


def to_json_value(value: Any) -> Any:
    """Convert a scalar as Go does when it writes JSON: 1.0 becomes 1. Raises YamlError."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise YamlError(f"{value} cannot be written as a number in JSON")
    return int(Decimal(repr(value))) if value.is_integer() and abs(value) < 1e21 else value


def format_float_key(number: float) -> str:
    """Format a key of a mapping that is a number, as Go formats a 32-bit float."""
    if math.isnan(number):
        return ".nan"
    try:
        packed = struct.pack("f", number)
    except OverflowError:
        packed = struct.pack("f", math.copysign(math.inf, number))
    (rounded,) = struct.unpack("f", packed)
    if math.isinf(rounded):
        return ".inf" if number > 0 else "-.inf"
    texts = (f"{rounded:.{digits}e}" for digits in range(10))
    shown = next(one for one in texts if struct.pack("f", float(one)) == packed)
    digits, _, written = shown.partition("e")
    exponent, decimals = int(written), len(digits.strip("-").replace(".", "")) - 1
    # Equivalent to strconv.FormatFloat with 'g' and precision -1.
    if -4 <= exponent < 6:
        return f"{float(shown):.{max(decimals - exponent, 0)}f}"
    return shown


# Quotes each string that some version of YAML would read as another type.
class _Dumper(yaml.SafeDumper):
    # Lists in mappings are indented, as in most manifests.
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


OTHER_LINE_BREAKS_PATTERN = re.compile("[\r\x85\u2028\u2029\ufeff]")
"""Pattern for line breaks of only some versions of YAML, which PyYAML would fold."""


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if OTHER_LINE_BREAKS_PATTERN.search(text):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif not isinstance(parse_plain_scalar(text), str):
        style = "'"
    return dumper.represent_scalar(f"{TAG_PREFIX}str", text, style)


_Dumper.add_representer(str, _represent_string)
MAX_LINE_CHARS = 1 << 30


def dump(document: Any, **style: Any) -> str:
    """Return ``document`` as YAML, and keep the order of its keys."""
    return dump_all([document], **style)


def dump_all(documents: Iterable[Any], **style: Any) -> str:
    """Return several documents as YAML, and keep the order of their keys."""
    text: str = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        width=MAX_LINE_CHARS,
        **{"allow_unicode": True, **style},
    )
    return text


def dump_flow(value: Any, as_json: bool = False) -> str:
    """Return ``value`` as YAML in flow style, or as JSON, on one line."""
    if as_json:
        return json.dumps(value)
    text: str = yaml.dump(
        [value], Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=MAX_LINE_CHARS,
        default_flow_style=True,
    )  # fmt: skip
    return text.rstrip("\n")[1:-1]
