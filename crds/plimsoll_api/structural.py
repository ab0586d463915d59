"""Structural schemas of msgspec structs for a CRD."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, get_args, get_origin

import msgspec

from plimsoll_api.manifest import Field, list_fields, unwrap_annotated

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_LIMIT_KEYWORDS = {
    str: {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
    list: {"min_length": "minItems", "max_length": "maxItems"},
    int: {"ge": "minimum", "le": "maximum"},
}


def make_structural_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of ``struct`` as a part of a manifest, with its CEL rules.

    An object that is never null, and whose fields all have defaults, gets the default ``{}``.
    """
    known = list_fields(struct)
    required = [one.name for one in known if one.required]
    rules = list(getattr(struct, "RULES", ()))
    return {
        "type": "object",
        "properties": {one.name: _make_property(one) for one in known},
        **({"required": required} if required else {}),
        **({"x-kubernetes-validations": rules} if rules else {}),
    }


def _make_property(field: Field) -> dict[str, Any]:
    schema = (
        dict(field.form.schema)
        if field.form is not None
        else _make_type_schema(field.type, field.constraints)
    )
    out = schema | field.schema
    rules = [part.get("x-kubernetes-validations", []) for part in (schema, field.schema)]
    if all(rules):
        out["x-kubernetes-validations"] = [*rules[0], *rules[1]]
    out["description"] = field.description
    if "properties" in out:
        if not field.nullable and not field.required:
            out["default"] = {}
    elif not any(
        field.default is none for none in (msgspec.NODEFAULT, None)
    ) and field.default not in (
        (),
        [],
    ):
        out["default"] = _format_default(field)
    return out


def _format_default(field: Field) -> Any:
    return (
        field.form.write(field.default)
        if field.form is not None
        else msgspec.to_builtins(field.default)
    )


def _make_type_schema(type_: Any, limits: msgspec.Meta) -> dict[str, Any]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return make_structural_schema(type_)
    if isinstance(type_, type) and issubclass(type_, Enum):
        return {"type": "string", "enum": [member.value for member in type_]}
    if get_origin(type_) is Literal:
        return {"type": "string", "enum": list(get_args(type_))}
    if get_origin(type_) in (list, tuple):
        item, metas = unwrap_annotated(get_args(type_)[0])
        items = _make_type_schema(item, metas[-1] if metas else msgspec.Meta())
        return {"type": "array", "items": items} | _make_bounds(list, limits)
    return {"type": _JSON_TYPES[type_]} | _make_bounds(int if type_ is float else type_, limits)


def _make_bounds(type_: type, limits: msgspec.Meta) -> dict[str, Any]:
    values = {word: getattr(limits, name) for name, word in _LIMIT_KEYWORDS.get(type_, {}).items()}
    return {word: value for word, value in values.items() if value is not None}
