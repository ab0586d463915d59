"""Find the resource claims that prevent a pod from being scheduled, because they do not exist."""

from __future__ import annotations

from typing import Any


def list_missing_claims(pod: dict[str, Any]) -> list[str]:
    """Return a text for each missing claim, because the scheduler writes no condition for it."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if spec.get("nodeName"):
        return []
    created = {one.get("name") for one in status.get("resourceClaimStatuses") or ()}
    found = []
    for one in spec.get("resourceClaims") or ():
        template, claim = one.get("resourceClaimTemplateName"), one.get("resourceClaimName")
        if template and one.get("name") not in created:
            found.append(f"ResourceClaimTemplate {template}")
        elif claim:
            found.append(f"ResourceClaim {claim}")
    return found
