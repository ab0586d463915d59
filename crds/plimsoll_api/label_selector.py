"""Kubernetes label selector that must not be empty: schema, rules and matching."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.schema import ATOMIC_CONFIG, ResourceModel

MAX_SELECTOR_TERMS = 16
MAX_SELECTOR_VALUES = 32
_NAME_PATTERN = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN_PATTERN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
KEY_PATTERN = rf"^({_DOMAIN_PATTERN}/)?{_NAME_PATTERN}$"
VALUE_PATTERN = rf"^({_NAME_PATTERN})?$"

EMPTY_MESSAGE = (
    "selector must not be empty, because it would select every pod in the namespace: add at least"
    " one label to matchLabels or matchExpressions"
)
VALUES_MESSAGE = (
    "values must not be empty for In and NotIn, and must be empty for Exists and DoesNotExist"
)
LABELS_MESSAGE = "matchLabels must have valid label keys, and values of at most 63 characters"

_SUBDOMAIN_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


# KEY_PATTERN also matches prefixes such as ``a..b``. With such a prefix in one policy, the API
# server would reject the webhooks of all policies.
def _check_subdomain(key: str) -> str:
    prefix, slash, _ = key.rpartition("/")
    if slash and not _SUBDOMAIN_PATTERN.fullmatch(prefix):
        raise ValueError(
            f"label key {key!r}: the prefix {prefix!r} before the slash must be a DNS subdomain"
        )
    return key


Key = Annotated[
    str, StringConstraints(max_length=317, pattern=KEY_PATTERN), AfterValidator(_check_subdomain)
]
Value = Annotated[str, StringConstraints(max_length=63, pattern=VALUE_PATTERN)]


class Operator(StrEnum):
    """Relation between a label and the values of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


_WITH_VALUES = (Operator.IN, Operator.NOT_IN)


REQUIREMENT_RULES = make_validations(
    make_rule(
        "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
        VALUES_MESSAGE,
        fieldPath=".values",
    )
)


class Requirement(ResourceModel):
    """Requirement on one label."""

    model_config = ResourceModel.model_config | {"json_schema_extra": REQUIREMENT_RULES}

    key: Key = Field(description="Key of the label.")
    operator: Operator = Field(description="Relation between the label and `values`.")
    values: Annotated[list[Value], Field(max_length=MAX_SELECTOR_VALUES)] = Field(
        default_factory=list,
        description="Values of the label. Required for `In` and `NotIn`, and must be empty for "
        "`Exists` and `DoesNotExist`.",
    )

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if (self.operator in _WITH_VALUES) != bool(self.values):
            raise ValueError(VALUES_MESSAGE)
        return self

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Report whether ``labels`` meet the requirement."""
        value = labels.get(self.key)
        if self.operator is Operator.IN:
            return value in self.values
        if self.operator is Operator.NOT_IN:
            return value not in self.values
        return (value is not None) == (self.operator is Operator.EXISTS)

    def to_query(self) -> str:
        """Return the requirement as a term of the query parameter ``labelSelector``."""
        if self.operator is Operator.EXISTS:
            return self.key
        if self.operator is Operator.DOES_NOT_EXIST:
            return f"!{self.key}"
        return f"{self.key} {self.operator.value.lower()} ({','.join(self.values)})"


def _check_keys(labels: dict[str, str]) -> dict[str, str]:
    for key in labels:
        if len(key) > 317 or not re.match(KEY_PATTERN, key):
            raise ValueError(f"{LABELS_MESSAGE}: {key[:317]!r}")
        _check_subdomain(key)
    return labels


class LabelSelector(ResourceModel):
    """Non-empty selector, which matches pods that meet all of its requirements."""

    model_config = ATOMIC_CONFIG

    match_labels: Annotated[
        dict[str, Value], Field(max_length=MAX_SELECTOR_TERMS), AfterValidator(_check_keys)
    ] = Field(
        default_factory=dict,
        description="Labels and values that a pod must have.",
        json_schema_extra=make_validations(
            make_rule(
                f"self.all(key, key.size() <= 317 && key.matches('{KEY_PATTERN}'))", LABELS_MESSAGE
            )
        ),
    )
    match_expressions: Annotated[list[Requirement], Field(max_length=MAX_SELECTOR_TERMS)] = Field(
        default_factory=list,
        description="Requirements on a pod's labels. The labels must meet all of them.",
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.match_labels and not self.match_expressions:
            raise ValueError(EMPTY_MESSAGE)
        return self

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Report whether the selector matches ``labels``."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            one.matches(labels) for one in self.match_expressions
        )

    def to_query(self) -> str:
        """Return the selector as the query parameter ``labelSelector`` of a list request."""
        terms = [f"{key}={value}" for key, value in self.match_labels.items()]
        return ",".join([*terms, *(one.to_query() for one in self.match_expressions)])

    def to_manifest(self) -> dict[str, Any]:
        """Return the selector as in a manifest, for example for a webhook's ``objectSelector``."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


SELECTOR_RULES = make_validations(
    make_rule(
        "has(self.matchLabels) && size(self.matchLabels) > 0 || "
        "has(self.matchExpressions) && size(self.matchExpressions) > 0",
        EMPTY_MESSAGE,
    )
)
