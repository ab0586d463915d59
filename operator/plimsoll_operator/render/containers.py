"""What all containers of a pod have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_api.serving import Resources

PROBE_PERIOD_S = 2


@dataclass(frozen=True)
class Images:
    """Images for services that name none."""

    engine: str
    supervisor: str


def probe(path: str, port: int) -> dict[str, Any]:
    """An HTTP probe; thresholds are the caller's."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }


def restricted() -> dict[str, Any]:
    """The security context that the restricted pod security standard asks for, and more."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def resources(wanted: Resources) -> dict[str, Any]:
    """Limits and requests."""
    return wanted.model_dump(by_alias=True)
