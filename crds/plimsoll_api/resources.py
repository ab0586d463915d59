"""Define a container's resource requests and limits, with the API server's checks for pods."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from plimsoll_api.cel import rule, validations
from plimsoll_api.schema import Amount, ResourceModel
from plimsoll_api.units import quantity

HUGE_PAGES = "hugepages-"


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
    def _within_limits(self) -> Self:
        for name, wanted in self.requests.items():
            limit = self.limits.get(name)
            if _is_indivisible(name) and (limit is None or quantity(wanted) != quantity(limit)):
                raise ValueError(f"requests.{name} {wanted} {_SAME}, which is {limit}")
            if limit is not None and quantity(wanted) > quantity(limit):
                raise ValueError(f"requests.{name} {wanted} {_BELOW}, which is {limit}")
        for name, amount in self.limits.items():
            if "/" in name and quantity(amount).denominator != 1:
                raise ValueError(f"limits.{name} {amount} {_WHOLE}")
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
ONE_SOURCE = "a resource claim needs one of resourceClaimName and resourceClaimTemplateName"


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
    def _one_source(self) -> Self:
        if (self.resource_claim_name is None) == (self.resource_claim_template_name is None):
            raise ValueError(ONE_SOURCE)
        return self


CLAIM_RULES = validations(
    rule("has(self.resourceClaimName) != has(self.resourceClaimTemplateName)", ONE_SOURCE)
)


class EngineResources(Resources):
    """Compute resources of an engine, which may include claims for devices."""

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
    def _each_name_once(self) -> Self:
        if len({one.name for one in self.resource_claims}) < len(self.resource_claims):
            raise ValueError("resourceClaims must have different names")
        return self


_SAME = "must be the same as its limit"
_BELOW = "must not be above its limit"
_WHOLE = "must be a whole number of devices"


def _is_indivisible(name: str) -> bool:
    return "/" in name or name.startswith(HUGE_PAGES)


def _amount(of: str) -> str:
    return f"quantity(string(self.{of}[r]))"


def _rule(of: str, wrong: str, message: str) -> dict[str, str]:
    """Return the rule that rejects resources for which ``wrong`` is true. ``r`` is their name."""
    return rule(
        f"!has(self.{of}) || !self.{of}.exists(r, {wrong})",
        f"resources.{of}: an amount {message}",
        messageExpression=f"'{of}.' + self.{of}.filter(r, {wrong})[0] + ' {message}'",
        fieldPath=f".{of}",
    )


_COMPARED = f"{_amount('requests')}.compareTo({_amount('limits')})"
_HAS_LIMIT = "(has(self.limits) && r in self.limits)"
_UNSHARED = f"(r.contains('/') || r.startsWith('{HUGE_PAGES}'))"

RESOURCE_RULES: dict[str, Any] = validations(
    _rule("requests", f"!{_UNSHARED} && {_HAS_LIMIT} && {_COMPARED} > 0", _BELOW),
    _rule("requests", f"{_UNSHARED} && (!{_HAS_LIMIT} || {_COMPARED} != 0)", _SAME),
    _rule("limits", f"r.contains('/') && !{_amount('limits')}.isInteger()", _WHOLE),
)
"""CEL rules for each ``resources`` that match the checks of :class:`Resources`."""
