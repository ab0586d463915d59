"""Structural schemas of msgspec structs for a CRD."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, get_args, get_origin

import msgspec

from plimsoll_api.manifest import Field, fields, unwrap

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_LIMITS = {
    str: {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
    list: {"min_length": "minItems", "max_length": "maxItems"},
    int: {"ge": "minimum", "le": "maximum"},
}


def structural(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of ``struct`` in its manifest form.

    A struct field that is never null and whose fields all have defaults gets the default ``{}``, so
    that these apply if a manifest omits it. ``RULES`` of the struct are rules on the whole object.
    """
    known = fields(struct)
    required = [one.name for one in known if one.required]
    rules = list(getattr(struct, "RULES", ()))
    return {
        "type": "object",
        "properties": {one.name: _property(one) for one in known},
        **({"required": required} if required else {}),
        **({"x-kubernetes-validations": rules} if rules else {}),
    }


def _property(one: Field) -> dict[str, Any]:
    schema = dict(one.form.schema) if one.form is not None else _type(one.type, one.constraints)
    out = schema | one.schema
    rules = [part.get("x-kubernetes-validations", []) for part in (schema, one.schema)]
    if all(rules):
        out["x-kubernetes-validations"] = [*rules[0], *rules[1]]
    out["description"] = one.description
    if "properties" in out:
        if not one.nullable and not one.required:
            out["default"] = {}
    elif not any(one.default is none for none in (msgspec.NODEFAULT, None)) and one.default not in (
        (),
        [],
    ):
        out["default"] = _default(one)
    return out


def _default(one: Field) -> Any:
    return one.form.write(one.default) if one.form is not None else msgspec.to_builtins(one.default)


def _type(type_: Any, limits: msgspec.Meta) -> dict[str, Any]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return structural(type_)
    if isinstance(type_, type) and issubclass(type_, Enum):
        return {"type": "string", "enum": [member.value for member in type_]}
    if get_origin(type_) is Literal:
        return {"type": "string", "enum": list(get_args(type_))}
    if get_origin(type_) in (list, tuple):
        item, metas = unwrap(get_args(type_)[0])
        items = _type(item, metas[-1] if metas else msgspec.Meta())
        return {"type": "array", "items": items} | _bounds(list, limits)
    return {"type": _PLAIN[type_]} | _bounds(int if type_ is float else type_, limits)


def _bounds(type_: type, limits: msgspec.Meta) -> dict[str, Any]:
    values = {word: getattr(limits, name) for name, word in _LIMITS.get(type_, {}).items()}
    return {word: value for word, value in values.items() if value is not None}
