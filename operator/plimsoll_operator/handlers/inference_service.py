"""Handle events of InferenceServices."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import SERVICE
from plimsoll_operator.runtime.watches import Watches, registry


@kopf.on.event(SERVICE.group, SERVICE.version, SERVICE.plural, registry=registry)
async def handle_inference_service(event: kopf.RawEvent, memo: Watches, **_: Any) -> None:
    """Queue the service for ``controllers/inference_service.py``."""
    memo.handle_event(SERVICE, event["type"], dict(event["object"]))
