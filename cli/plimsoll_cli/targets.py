"""Parse arguments that name replicas: a pod, or KIND/NAME as in kubectl."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_api.names import (
    POLICY_KIND,
    POLICY_PLURAL,
    POLICY_SHORT_NAME,
    SERVICE_KIND,
    SERVICE_SHORT_NAME,
)
from plimsoll_cli.errors import UsageError

POD_KIND = "Pod"
KIND_ALIASES = {
    "po": POD_KIND,
    "deploy": "Deployment",
    "sts": "StatefulSet",
    "ds": "DaemonSet",
    "rs": "ReplicaSet",
    "lws": "LeaderWorkerSet",
    SERVICE_SHORT_NAME: SERVICE_KIND,
    POLICY_SHORT_NAME: POLICY_KIND,
    POLICY_PLURAL: POLICY_KIND,
}
"""Short names and irregular plurals of kinds."""
TARGET_KINDS = (
    POD_KIND, "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "LeaderWorkerSet",
    "RayCluster", SERVICE_KIND, POLICY_KIND,
)  # fmt: skip
_KIND_BY_WORD = (
    {kind.lower(): kind for kind in TARGET_KINDS}
    | {f"{kind.lower()}s": kind for kind in TARGET_KINDS}
    | KIND_ALIASES
)


@dataclass(frozen=True)
class Target:
    """Target of an action: one pod, or all supervised pods of another object."""

    kind: str
    name: str

    @property
    def is_pod(self) -> bool:
        """Whether the target is a single pod."""
        return self.kind == POD_KIND

    def __str__(self) -> str:
        return self.name if self.is_pod else f"{self.kind.lower()}/{self.name}"


def parse_target(text: str) -> Target:
    """Return the target that ``text`` names; a name without a kind names a pod.

    Raises UsageError for an unknown kind.
    """
    word, slash, name = text.partition("/")
    if not slash:
        return Target(POD_KIND, text)
    kind = _KIND_BY_WORD.get(word.partition(".")[0].lower())
    if kind is None:
        raise UsageError(
            f"{text}: {word!r} is not a supported kind: use one of {', '.join(TARGET_KINDS)}"
        )
    if not name or "/" in name:
        raise UsageError(f"{text}: the format is KIND/NAME, for example deployment/vllm")
    return Target(kind, name)
