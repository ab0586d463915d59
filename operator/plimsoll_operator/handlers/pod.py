"""Handle events of InferenceServices' pods."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import POD
from plimsoll_operator.runtime.watches import Watches, registry


@kopf.on.event(POD.group, POD.version, POD.plural, registry=registry)
async def handle_pod(event: kopf.RawEvent, memo: Watches, **_: Any) -> None:
    """Queue the pod's service."""
    memo.handle_event(POD, event["type"], dict(event["object"]))
