"""Build the CEL rules of the CRDs."""

from __future__ import annotations

from typing import Any

Rule = dict[str, str]


def make_rule(expression: str, message: str, **extra_keys: str) -> Rule:
    """Return a CEL rule; ``message`` names the field and says what to write."""
    return {"rule": expression, "message": message, **extra_keys}


def make_validations(*rules: Rule) -> dict[str, Any]:
    """Return the schema keys that contain ``rules``."""
    return {"x-kubernetes-validations": list(rules)}
