"""What all containers of a pod have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_api.resources import Resources

PROBE_PERIOD_S = 2

LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""The end of the log of a container that fails stands in its pod's status, and so in ours."""


@dataclass(frozen=True)
class Images:
    """Images for services that name none. Without one for the probe, the supervisor's has it."""

    engine: str
    supervisor: str
    probe: str | None = None


def probe(path: str, port: int, scheme: str = "HTTP") -> dict[str, Any]:
    """Build an HTTP or HTTPS probe; the caller adds thresholds.

    The kubelet does not verify the certificate.
    """
    return {
        "httpGet": {"path": path, "port": port, "scheme": scheme},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }


def restricted() -> dict[str, Any]:
    """Return the security context that the restricted pod security standard asks for, and more."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def resources(wanted: Resources) -> dict[str, Any]:
    """Limits and requests."""
    return wanted.model_dump(by_alias=True)
