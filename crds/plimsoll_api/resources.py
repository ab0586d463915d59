"""Compute resources of a container. A manifest is checked as the API server checks pods."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from plimsoll_api.cel import rule, validations
from plimsoll_api.schema import Amount, ResourceModel
from plimsoll_api.units import quantity

HUGE_PAGES = "hugepages-"


class Resources(ResourceModel):
    """Compute resources of a container."""

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


_SAME = "must be the same as its limit"
_BELOW = "must not be above its limit"
_WHOLE = "must be a whole number of devices"


def _is_indivisible(name: str) -> bool:
    return "/" in name or name.startswith(HUGE_PAGES)


def _amount(of: str) -> str:
    return f"quantity(string(self.{of}[r]))"


def _rule(of: str, wrong: str, message: str) -> dict[str, str]:
    """Return the rule that no resource ``r`` is ``wrong``; the message names the first that is."""
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
"""The same checks as CEL rules, for each ``resources``."""
