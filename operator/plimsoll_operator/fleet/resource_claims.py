"""Find the resource claims that are missing, so that the scheduler ignores a pod."""

from __future__ import annotations

from typing import Any


def list_missing_claims(pod: dict[str, Any]) -> list[str]:
    """Return the claims that a ``pod`` waits for, as text; empty if it waits for none.

    The scheduler ignores a pod until each of its claims exists, and writes no condition. Claims of
    a ResourceClaimTemplate are named in the pod's status as soon as they were created.
    """
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
