"""Kubernetes label selector that must not be empty: schema, rules and matching."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from plimsoll_api.cel import rule, validations
from plimsoll_api.schema import ATOMIC, ResourceModel

MAX_TERMS = 16
MAX_VALUES = 32
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
KEY_PATTERN = rf"^({_DOMAIN}/)?{_NAME}$"
VALUE_PATTERN = rf"^({_NAME})?$"

EMPTY_MESSAGE = (
    "selector must not be empty: it would select every pod of the namespace; name at least one "
    "label in matchLabels or matchExpressions"
)
VALUES_MESSAGE = "values must name at least one value for In and NotIn, and none for others"
LABELS_MESSAGE = "matchLabels must have valid label keys, and values of at most 63 characters"

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def _check_subdomain(key: str) -> str:
    """Raise ValueError for a key whose prefix is no DNS subdomain: the pattern allows ``a..b``.

    Because of one such key, the API server would reject the webhooks of all policies.
    """
    prefix, slash, _ = key.rpartition("/")
    if slash and not _SUBDOMAIN.fullmatch(prefix):
        raise ValueError(f"{prefix!r} before the slash is not a DNS subdomain")
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


REQUIREMENT_RULES = validations(
    rule(
        "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
        VALUES_MESSAGE,
        fieldPath=".values",
    )
)


class Requirement(ResourceModel):
    """Requirement on one label."""

    model_config = ResourceModel.model_config | {"json_schema_extra": REQUIREMENT_RULES}

    key: Key = Field(description="Key of the label.")
    operator: Operator = Field(description="How the label relates to `values`.")
    values: Annotated[list[Value], Field(max_length=MAX_VALUES)] = Field(
        default_factory=list,
        description="Values of the label. Required for `In` and `NotIn`, and must be empty for "
        "`Exists` and `DoesNotExist`.",
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
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

    def query(self) -> str:
        """Return the requirement as a term of the query parameter ``labelSelector``."""
        if self.operator is Operator.EXISTS:
            return self.key
        if self.operator is Operator.DOES_NOT_EXIST:
            return f"!{self.key}"
        return f"{self.key} {self.operator.value.lower()} ({','.join(self.values)})"


def _valid_keys(labels: dict[str, str]) -> dict[str, str]:
    for key in labels:
        if len(key) > 317 or not re.match(KEY_PATTERN, key):
            raise ValueError(f"{LABELS_MESSAGE}: {key[:317]!r}")
        _check_subdomain(key)
    return labels


class LabelSelector(ResourceModel):
    """Non-empty selector of pods that meet all of its requirements."""

    model_config = ATOMIC

    match_labels: Annotated[
        dict[str, Value], Field(max_length=MAX_TERMS), AfterValidator(_valid_keys)
    ] = Field(
        default_factory=dict,
        description="Labels that a pod must have, with these values.",
        json_schema_extra=validations(
            rule(
                f"self.all(key, key.size() <= 317 && key.matches('{KEY_PATTERN}'))", LABELS_MESSAGE
            )
        ),
    )
    match_expressions: Annotated[list[Requirement], Field(max_length=MAX_TERMS)] = Field(
        default_factory=list,
        description="Requirements that a pod's labels must meet, all of them.",
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.match_labels and not self.match_expressions:
            raise ValueError(EMPTY_MESSAGE)
        return self

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Report whether the selector matches ``labels``."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            one.matches(labels) for one in self.match_expressions
        )

    def query(self) -> str:
        """Return the selector as the query parameter ``labelSelector`` of a list request."""
        terms = [f"{key}={value}" for key, value in self.match_labels.items()]
        return ",".join([*terms, *(one.query() for one in self.match_expressions)])

    def manifest(self) -> dict[str, Any]:
        """Return the selector as in a manifest, for example for a webhook's ``objectSelector``."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


SELECTOR_RULES = validations(
    rule(
        "has(self.matchLabels) && size(self.matchLabels) > 0 || "
        "has(self.matchExpressions) && size(self.matchExpressions) > 0",
        EMPTY_MESSAGE,
    )
)
