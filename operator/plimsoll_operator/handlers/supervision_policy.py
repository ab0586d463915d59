"""Events of SupervisionPolicies."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import POLICY
from plimsoll_operator.runtime.watches import Watches, registry


@kopf.on.event(POLICY.group, POLICY.version, POLICY.plural, registry=registry)
async def supervision_policy(event: kopf.RawEvent, memo: Watches, **_: Any) -> None:
    """Reconcile the policy: ``controllers/supervision_policy.py``."""
    memo.take(POLICY, event["type"], dict(event["object"]))
