"""Types of manifest fields, with the same checks in pydantic and in the CRD's schema."""

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

from plimsoll_api.cel import make_validations
from plimsoll_api.manifest import (
    DURATION_SCHEMA,
    POSITIVE_DURATION_RULE,
    QUANTITY_PATTERN,
    QUANTITY_SCHEMA,
    ManifestError,
    Problem,
    ProblemKind,
    parse_manifest,
)
from plimsoll_api.structural import make_structural_schema
from plimsoll_api.units import parse_bytes, parse_duration, parse_quantity


class ResourceModel(BaseModel):
    """Part of a manifest; its fields have names in camelCase, and unknown fields are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


def _check_quantity(text: str) -> str:
    parse_quantity(text)
    return text


def _check_duration(text: str) -> str:
    parse_duration(text)
    return text


def _check_not_negative(text: str) -> str:
    if parse_quantity(text) < 0:
        raise ValueError(f"must be at least 0, not {text!r}")
    return text


def _check_positive_bytes(text: str) -> str:
    if parse_bytes(text) <= 0:
        raise ValueError(f"must be greater than 0, not {text!r}; to set no budget, omit the field")
    return text


def _check_positive_seconds(text: str) -> str:
    if parse_duration(text) <= 0:
        raise ValueError(f"must be greater than 0, not {text!r}")
    return text


# YAML parses a quantity such as ``4096`` as a number.
def _convert_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_convert_to_text),
    AfterValidator(_check_quantity),
    Field(json_schema_extra=QUANTITY_SCHEMA),
]
_AMOUNT_SCHEMA = QUANTITY_SCHEMA | {
    "pattern": QUANTITY_PATTERN.replace("[+-]?", "[+]?", 1),
    "maxLength": 32,
}
Amount = Annotated[
    str,
    BeforeValidator(_convert_to_text),
    StringConstraints(max_length=32),
    AfterValidator(_check_quantity),
    AfterValidator(_check_not_negative),
    Field(json_schema_extra=_AMOUNT_SCHEMA),
]
"""Amount of a resource; at least zero."""
PositiveQuantity = Annotated[Quantity, AfterValidator(_check_positive_bytes)]
Duration = Annotated[str, AfterValidator(_check_duration), Field(json_schema_extra=DURATION_SCHEMA)]
PositiveDuration = Annotated[
    Duration,
    AfterValidator(_check_positive_seconds),
    Field(json_schema_extra=DURATION_SCHEMA | make_validations(POSITIVE_DURATION_RULE)),
]
PreservedObject = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


STRUCTURAL_KEY = "x-structural"
"""Key that marks a schema as already structural."""


ATOMIC_CONFIG = ResourceModel.model_config | {
    "json_schema_extra": {"x-kubernetes-map-type": "atomic"}
}
"""Configuration of a model that server-side apply must replace as a whole."""


class FromStruct:
    """Annotation of a pydantic field whose type is a msgspec struct."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._struct = struct

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> Any:
        return make_structural_schema(self._struct) | {STRUCTURAL_KEY: True}

    def _read(self, raw: Any) -> msgspec.Struct:
        if isinstance(raw, self._struct):
            return raw
        try:
            return parse_manifest(self._struct, raw)
        except ManifestError as error:
            raise ValidationError.from_exception_data(
                self._struct.__name__, [_make_error_details(one) for one in error.problems]
            ) from None


def _make_error_details(problem: Problem) -> InitErrorDetails:
    known = {ProblemKind.UNKNOWN: "extra_forbidden", ProblemKind.MISSING: "missing"}
    return InitErrorDetails(
        type=known.get(problem.fault)
        or PydanticCustomError("value_error", "{reason}", {"reason": problem.message}),
        loc=problem.path,
        input=problem.value,
    )
