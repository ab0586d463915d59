"""Convert manifests to msgspec structs.

A struct contains parsed values: bytes and seconds as numbers. :func:`describe_field` annotates each
field with its form in a manifest, from which both the CRD's schema (:mod:`plimsoll_api.structural`)
and the parser (:func:`parse_manifest`) are derived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from plimsoll_api.cel import Rule, make_rule, make_validations
from plimsoll_api.units import (
    format_duration,
    parse_bytes,
    parse_duration,
    parse_quantity,
)

QUANTITY_PATTERN = (
    r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
)
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|h|m|s))+$"
QUANTITY_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": QUANTITY_PATTERN,
    "x-kubernetes-int-or-string": True,
}
DURATION_SCHEMA: dict[str, Any] = {"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}
POSITIVE_DURATION_RULE = make_rule("self.matches('[1-9]')", "the duration must be greater than 0")

MIN_SIZE_BYTES = 1 << 20
"""Smallest size of memory that a manifest may contain. Nothing is measured as finely, so a smaller
one is a number whose unit is missing or wrong."""
SIZE_HINT = (
    "without a unit, it is in bytes, and m means thousandths of a byte; write, for example, 2Gi"
)

_MSGSPEC_ERROR_PATTERN = re.compile(
    r"Expected `(?P<type>\w+)`(?: (?P<sign>[<>]=?) (?P<bound>[\d.]+)|, got `\w+`)?(?: - at `\$.*)?$"
)
_TYPE_NAMES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false",
    "array": "a list", "object": "an object",
}  # fmt: skip
_BOUND_NAMES = {">=": "of at least", ">": "greater than", "<=": "of at most", "<": "less than"}

PositiveBytes = Annotated[int, msgspec.Meta(gt=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Path = tuple[int | str, ...]


class FieldForm(NamedTuple):
    """Notation of a field's value in a manifest.

    ``read`` converts it to the struct's value, or raises ValueError. ``write`` converts the
    struct's default value back. ``schema`` is its structural schema.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    schema: dict[str, Any]


def convert_to_text(value: Any) -> str:
    """Return a string or an integer as a string. Raises ValueError for other types.

    YAML parses a quantity such as ``4096`` as an integer.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("must be a string")
    return str(value)


def _read_size(value: Any) -> int:
    text = convert_to_text(value)
    size = parse_bytes(text)
    if parse_quantity(text) < MIN_SIZE_BYTES:
        raise ValueError(f"must be at least 1Mi, not {text!r}: {SIZE_HINT}")
    return size


def _read_limit(value: Any) -> int:
    _read_size(value)
    return int(parse_quantity(convert_to_text(value)))


def _read_seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("must be a string such as 90s, 10m or 1h30m")
    return parse_duration(value)


def _read_positive_seconds(value: Any) -> float:
    if (seconds := _read_seconds(value)) <= 0:
        raise ValueError(f"must be greater than 0, not {value!r}")
    return seconds


SIZE_FORM = FieldForm(_read_size, int, QUANTITY_SCHEMA)
LIMIT_FORM = FieldForm(_read_limit, int, QUANTITY_SCHEMA)
"""Form of a limit, which is rounded down, so that a budget above it is rejected as by the API
server."""
DURATION_FORM = FieldForm(_read_seconds, format_duration, DURATION_SCHEMA)
POSITIVE_DURATION_FORM = FieldForm(
    _read_positive_seconds,
    format_duration,
    DURATION_SCHEMA | make_validations(POSITIVE_DURATION_RULE),
)


def make_size_rule(field: str, hint: str = "", other: str = "") -> Rule:
    """Return the CEL rule of a size; ``other`` is a text that the field may have in its place."""
    size = "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1Mi')) >= 0"
    return make_rule(
        f"string(self) == '{other}' || ({size})" if other else size,
        f"{field} must be at least 1Mi: {SIZE_HINT}{hint}",
    )


class FieldValues(dict[str, Any]):
    """Values of several struct fields that are read from a single field of a manifest."""


class Field(NamedTuple):
    """Field of a struct, and its form in a manifest.

    ``type`` is the field's type without None. ``name`` is the name in a manifest.
    """

    name: str
    python_name: str
    type: Any
    constrained: Any
    nullable: bool
    form: FieldForm | None
    default: Any
    constraints: msgspec.Meta
    description: str
    schema: dict[str, Any]

    @property
    def required(self) -> bool:
        """Whether a manifest must set the field."""
        return self.default is msgspec.NODEFAULT


def describe_field(
    description: str,
    *rules: Rule,
    name: str | None = None,
    form: FieldForm | None = None,
    schema: dict[str, Any] | None = None,
) -> msgspec.Meta:
    """Return the annotation that makes a struct field part of a manifest.

    Args:
        description: The text for ``kubectl explain``.
        rules: CEL rules on the field.
        name: The field's name in a manifest; by default, its name in the struct in camelCase.
        form: The notation of the value; None if it is the same as in the struct.
        schema: Additional keys of the structural schema.

    """
    extra = (schema or {}) | (make_validations(*rules) if rules else {})
    return msgspec.Meta(
        description=description,
        extra_json_schema=extra or None,
        extra={"name": name, "form": form},
    )


def to_camel_case(name: str) -> str:
    """Convert a field's name from snake case to camel case, as in a manifest."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


_FIELDS_BY_STRUCT: dict[type, tuple[Field, ...]] = {}


def list_fields(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of ``struct`` that a manifest can set: the fields with a description."""
    if struct not in _FIELDS_BY_STRUCT:
        hints = get_type_hints(struct, include_extras=True)
        found = (_make_field(one, hints[one.name]) for one in msgspec.structs.fields(struct))
        _FIELDS_BY_STRUCT[struct] = tuple(one for one in found if one.description)
    return _FIELDS_BY_STRUCT[struct]


def _make_field(info: msgspec.structs.FieldInfo, hint: Any) -> Field:
    annotated, metas = unwrap_annotated(hint)
    nullable = get_origin(annotated) in (Union, UnionType) and NoneType in get_args(annotated)
    constrained = hint
    if nullable:
        (annotated,) = (part for part in get_args(annotated) if part is not NoneType)
        annotated, more = unwrap_annotated(annotated)
        metas = [*more, *metas]
    default = info.default
    if info.default_factory is not msgspec.NODEFAULT:
        default = info.default_factory()
    name, form, description = None, None, ""
    schema: dict[str, Any] = {}
    constraints = msgspec.Meta()
    for meta in metas:
        extra = meta.extra or {}
        name, form = extra.get("name") or name, extra.get("form") or form
        description = meta.description or description
        schema |= meta.extra_json_schema or {}
        if meta.description is None:
            constraints = meta
    written_name = name or (
        to_camel_case(info.name) if info.encode_name == info.name else info.encode_name
    )
    return Field(
        written_name, info.name, annotated, constrained, nullable, form, default, constraints,
        description, schema,
    )  # fmt: skip


def unwrap_annotated(hint: Any) -> tuple[Any, list[msgspec.Meta]]:
    """Return the type in an ``Annotated`` hint, and its msgspec annotations."""
    if get_origin(hint) is not Annotated:
        return hint, []
    inner, *metas = get_args(hint)
    return inner, [meta for meta in metas if isinstance(meta, msgspec.Meta)]


class ProblemKind(StrEnum):
    """Kind of a problem in a manifest."""

    UNKNOWN = "unknown"
    MISSING = "missing"
    VALUE = "value"


class Problem(NamedTuple):
    """Problem in a manifest; ``path`` leads from the struct to the field."""

    path: Path
    fault: ProblemKind
    message: str
    value: Any


class ManifestError(ValueError):
    """Raised for an invalid manifest; ``problems`` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{_format_path(one.path)}: {one.message}" for one in problems))
        self.problems = problems


def _format_path(path: Path) -> str:
    return ".".join(map(str, path)) or "(root)"


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def parse_manifest(struct: type[_Struct], raw: Any) -> _Struct:
    """Parse the part ``raw`` of a manifest as a ``struct``. Raises :class:`ManifestError`."""
    problems: list[Problem] = []
    value = _read_struct(struct, raw, (), problems)
    if problems or not isinstance(value, struct):
        raise ManifestError(problems)
    return value


def _read_struct(
    struct: type[msgspec.Struct], raw: Any, path: Path, problems: list[Problem]
) -> msgspec.Struct | None:
    if not isinstance(raw, dict):
        problems.append(Problem(path, ProblemKind.VALUE, "must be an object", raw))
        return None
    before, known = len(problems), {one.name: one for one in list_fields(struct)}
    values: dict[str, Any] = {}
    for name in raw.keys() - known.keys():
        problems.append(
            Problem((*path, name), ProblemKind.UNKNOWN, "is not a known field", raw[name])
        )
    for one in known.values():
        if one.name in raw:
            value = _read_value(one, raw[one.name], (*path, one.name), problems)
            values |= value if isinstance(value, FieldValues) else {one.python_name: value}
        elif one.required:
            problems.append(Problem((*path, one.name), ProblemKind.MISSING, "is required", raw))
    if len(problems) > before:
        return None
    try:
        return struct(**values)
    except ValueError as error:
        problems.append(Problem(path, ProblemKind.VALUE, str(error), raw))
        return None


def _read_value(field: Field, raw: Any, path: Path, problems: list[Problem]) -> Any:
    if raw is None and field.nullable:
        return None
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
        return _read_struct(field.type, raw, path, problems)
    try:
        value = field.form.read(raw) if field.form is not None else raw
        if isinstance(value, FieldValues):
            return value
        return msgspec.convert(value, field.constrained)
    except msgspec.ValidationError as error:
        message = _describe_allowed(field.type) or _describe_expected(str(error))
    except ValueError as error:
        message = str(error)
    problems.append(Problem(path, ProblemKind.VALUE, message, raw))
    return None


# For an enumeration or a list of its members; empty for other types.
def _describe_allowed(type_: Any) -> str:
    inner = next(iter(get_args(type_)), type_)
    inner, _ = unwrap_annotated(inner)
    if isinstance(inner, type) and issubclass(inner, Enum):
        values = ", ".join(str(member.value) for member in inner)
        return f"must be one of {values}" if inner is type_ else f"must contain only {values}"
    return ""


# The text of a msgspec error is "Expected `int` >= 1" or "Expected `int`, got `str`", and names
# the place of an item in a list.
def _describe_expected(text: str) -> str:
    found = _MSGSPEC_ERROR_PATTERN.match(text)
    if found is None or found["type"] not in _TYPE_NAMES:
        return text.partition(" - at `$")[0]
    bound = f" {_BOUND_NAMES[found['sign']]} {found['bound']}" if found["sign"] else ""
    return f"must be {_TYPE_NAMES[found['type']]}{bound}"
