"""Resource requests and limits of a container, with the checks of the API server."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.schema import Amount, ResourceModel
from plimsoll_api.units import parse_quantity

HUGE_PAGES_PREFIX = "hugepages-"


class Resources(ResourceModel):
    """Resource requests and limits of a container."""

    limits: Annotated[dict[str, Amount], Field(max_length=32)] = Field(
        default_factory=dict,
        description="Maximum amount of each resource that the container may use, by resource name.",
    )
    requests: Annotated[dict[str, Amount], Field(max_length=32)] = Field(
        default_factory=dict,
        description="Amount of each resource that is reserved for the container, by "
        "resource name. Must not exceed the limit. For devices (resource names with a "
        "domain) and huge pages, the request must equal the limit, and you can omit it.",
    )

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        for name, wanted in self.requests.items():
            limit = self.limits.get(name)
            if _is_indivisible(name) and (
                limit is None or parse_quantity(wanted) != parse_quantity(limit)
            ):
                raise ValueError(f"requests.{name} {wanted} {_EQUAL_MESSAGE}, which is {limit}")
            if limit is not None and parse_quantity(wanted) > parse_quantity(limit):
                raise ValueError(f"requests.{name} {wanted} {_NOT_ABOVE_MESSAGE}, which is {limit}")
        for name, amount in self.limits.items():
            if "/" in name and parse_quantity(amount).denominator != 1:
                raise ValueError(f"limits.{name} {amount} {_WHOLE_NUMBER_MESSAGE}")
        return self


_LABEL = Annotated[
    str, StringConstraints(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
_NAME = Annotated[
    str,
    StringConstraints(
        max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
    ),
]
ONE_CLAIM_SOURCE_MESSAGE = (
    "a resource claim needs exactly one of resourceClaimName and resourceClaimTemplateName"
)


class DeviceClaim(ResourceModel):
    """Devices from a ResourceClaim (dynamic resource allocation)."""

    name: _LABEL = Field(description="Name of the claim within the pod.")
    resource_claim_name: _NAME | None = Field(
        default=None,
        description="Name of a ResourceClaim in the same namespace, which all replicas share.",
    )
    resource_claim_template_name: _NAME | None = Field(
        default=None,
        description="Name of a ResourceClaimTemplate in the same namespace, from which each "
        "replica gets a claim of its own.",
    )
    request: _LABEL | None = Field(
        default=None,
        description="Name of a request in the claim. If unset, the engine gets all its devices.",
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.resource_claim_name is None) == (self.resource_claim_template_name is None):
            raise ValueError(ONE_CLAIM_SOURCE_MESSAGE)
        return self


CLAIM_RULES = make_validations(
    make_rule(
        "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
        ONE_CLAIM_SOURCE_MESSAGE,
    )
)


class EngineResources(Resources):
    """Compute resources of an engine, with claims for devices."""

    resource_claims: Annotated[
        list[Annotated[DeviceClaim, Field(json_schema_extra=CLAIM_RULES)]], Field(max_length=8)
    ] = Field(
        default_factory=list,
        description="Devices allocated through dynamic resource allocation (DRA). Each claim "
        "becomes one of the pod's `resourceClaims`, and the engine's container gets its devices.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )

    @model_validator(mode="after")
    def _check_names_unique(self) -> Self:
        if len({one.name for one in self.resource_claims}) < len(self.resource_claims):
            raise ValueError("two resourceClaims have the same name: rename one of them")
        return self


_EQUAL_MESSAGE = "must be the same as its limit"
_NOT_ABOVE_MESSAGE = "must not be above its limit"
_WHOLE_NUMBER_MESSAGE = "must be a whole number of devices"


def _is_indivisible(name: str) -> bool:
    return "/" in name or name.startswith(HUGE_PAGES_PREFIX)


def _make_amount_expression(field: str) -> str:
    return f"quantity(string(self.{field}[r]))"


# ``field`` is ``requests`` or ``limits``. The rule rejects the amount of a resource ``r`` if the
# CEL expression ``violation`` is true.
def _make_amount_rule(field: str, violation: str, message: str) -> dict[str, str]:
    return make_rule(
        f"!has(self.{field}) || !self.{field}.exists(r, {violation})",
        f"resources.{field}: an amount {message}",
        messageExpression=f"'{field}.' + self.{field}.filter(r, {violation})[0] + ' {message}'",
        fieldPath=f".{field}",
    )


_COMPARISON_CEL = (
    f"{_make_amount_expression('requests')}.compareTo({_make_amount_expression('limits')})"
)
_HAS_LIMIT_CEL = "(has(self.limits) && r in self.limits)"
_IS_INDIVISIBLE_CEL = f"(r.contains('/') || r.startsWith('{HUGE_PAGES_PREFIX}'))"

RESOURCE_RULES: dict[str, Any] = make_validations(
    _make_amount_rule(
        "requests",
        f"!{_IS_INDIVISIBLE_CEL} && {_HAS_LIMIT_CEL} && {_COMPARISON_CEL} > 0",
        _NOT_ABOVE_MESSAGE,
    ),
    _make_amount_rule(
        "requests",
        f"{_IS_INDIVISIBLE_CEL} && (!{_HAS_LIMIT_CEL} || {_COMPARISON_CEL} != 0)",
        _EQUAL_MESSAGE,
    ),
    _make_amount_rule(
        "limits",
        f"r.contains('/') && !{_make_amount_expression('limits')}.isInteger()",
        _WHOLE_NUMBER_MESSAGE,
    ),
)
"""CEL rules for ``resources`` fields, equivalent to the checks of :class:`Resources`."""
