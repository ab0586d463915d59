"""Field types of manifests. Their pydantic checks are also part of the CRD's schema."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from plimsoll_api.cel import validations
from plimsoll_api.manifest import (
    DURATION_SCHEMA,
    POSITIVE_DURATION_RULE,
    QUANTITY_PATTERN,
    QUANTITY_SCHEMA,
    ManifestError,
    Problem,
    ProblemKind,
    from_manifest,
)
from plimsoll_api.structural import structural
from plimsoll_api.units import parse_bytes, parse_duration, quantity


class ResourceModel(BaseModel):
    """Part of a manifest, with names in camelCase. Unknown fields are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


def _is_quantity(text: str) -> str:
    quantity(text)
    return text


def _is_duration(text: str) -> str:
    parse_duration(text)
    return text


def _validate_not_negative(text: str) -> str:
    if quantity(text) < 0:
        raise ValueError(f"must be at least 0, not {text!r}")
    return text


def _validate_more_than_zero_bytes(text: str) -> str:
    if parse_bytes(text) <= 0:
        raise ValueError(f"must be greater than 0, not {text!r}; leave the field out for no budget")
    return text


def _more_than_zero_seconds(text: str) -> str:
    if parse_duration(text) <= 0:
        raise ValueError(f"must be greater than 0, not {text!r}")
    return text


def _as_text(value: Any) -> Any:
    """Return an integer as text, for quantities such as ``4096``, which YAML parses as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_is_quantity),
    Field(json_schema_extra=QUANTITY_SCHEMA),
]
_AMOUNT_SCHEMA = QUANTITY_SCHEMA | {
    "pattern": QUANTITY_PATTERN.replace("[+-]?", "[+]?", 1),
    "maxLength": 32,
}
Amount = Annotated[
    str,
    BeforeValidator(_as_text),
    StringConstraints(max_length=32),
    AfterValidator(_is_quantity),
    AfterValidator(_validate_not_negative),
    Field(json_schema_extra=_AMOUNT_SCHEMA),
]
"""Amount of a resource; at least zero."""
PositiveQuantity = Annotated[Quantity, AfterValidator(_validate_more_than_zero_bytes)]
Duration = Annotated[str, AfterValidator(_is_duration), Field(json_schema_extra=DURATION_SCHEMA)]
PositiveDuration = Annotated[
    Duration,
    AfterValidator(_more_than_zero_seconds),
    Field(json_schema_extra=DURATION_SCHEMA | validations(POSITIVE_DURATION_RULE)),
]
PreservedObject = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


STRUCTURAL = "x-structural"
"""Key that marks a schema from :func:`plimsoll_api.structural.structural`, which is already
structural."""


ATOMIC = ResourceModel.model_config | {"json_schema_extra": {"x-kubernetes-map-type": "atomic"}}
"""Configuration of a model that one field manager must own as a whole, because a mixture of two
values would be wrong."""


class FromStruct:
    """Annotation of a pydantic field whose type is a msgspec struct.

    The struct defines the field's form, checks and description.
    """

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._struct = struct

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> Any:
        return structural(self._struct) | {STRUCTURAL: True}

    def _read(self, raw: Any) -> msgspec.Struct:
        if isinstance(raw, self._struct):
            return raw
        try:
            return from_manifest(self._struct, raw)
        except ManifestError as error:
            raise ValidationError.from_exception_data(
                self._struct.__name__, [_details(one) for one in error.problems]
            ) from None


def _details(one: Problem) -> InitErrorDetails:
    known = {ProblemKind.UNKNOWN: "extra_forbidden", ProblemKind.MISSING: "missing"}
    return InitErrorDetails(
        type=known.get(one.fault)
        or PydanticCustomError("value_error", "{reason}", {"reason": one.message}),
        loc=one.path,
        input=one.value,
    )
