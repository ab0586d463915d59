"""Field types that the manifests share: what pydantic checks here, the CRD's schema checks too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from plimsoll_api.units import parse_bytes, parse_duration, quantity

GROUP = "plimsoll.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

QUANTITY_PATTERN = (
    r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
)
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|h|m|s))+$"


class Model(BaseModel):
    """A part of a manifest: camelCase outside, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


def rule(expression: str, message: str, **more: str) -> dict[str, str]:
    """A CEL rule of the CRD. ``message`` names the field and says what to write."""
    return {"rule": expression, "message": message, **more}


def validations(*rules: dict[str, str]) -> dict[str, Any]:
    """Schema keys that carry ``rules``."""
    return {"x-kubernetes-validations": list(rules)}


def _is_quantity(text: str) -> str:
    quantity(text)
    return text


def _is_duration(text: str) -> str:
    parse_duration(text)
    return text


def _more_than_zero_bytes(text: str) -> str:
    if parse_bytes(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0; leave the field out for no budget")
    return text


def _more_than_zero_seconds(text: str) -> str:
    if parse_duration(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def _as_text(value: Any) -> Any:
    """YAML reads ``4096`` as a number: a quantity all the same."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_QUANTITY_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": QUANTITY_PATTERN,
    "x-kubernetes-int-or-string": True,
}
_DURATION_SCHEMA: dict[str, Any] = {"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}

Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_is_quantity),
    Field(json_schema_extra=_QUANTITY_SCHEMA),
]
PositiveQuantity = Annotated[Quantity, AfterValidator(_more_than_zero_bytes)]
Duration = Annotated[str, AfterValidator(_is_duration), Field(json_schema_extra=_DURATION_SCHEMA)]
PositiveDuration = Annotated[
    Duration,
    AfterValidator(_more_than_zero_seconds),
    Field(
        json_schema_extra=_DURATION_SCHEMA
        | validations(rule("self.matches('[1-9]')", "the duration must be more than 0"))
    ),
]
PreservedObject = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
