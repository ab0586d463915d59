"""Handle events of objects that the operator created, so that it reverts changes by others."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import BY_KIND, OWNED_KINDS
from plimsoll_operator.runtime.watches import Watches, registry


async def owned(event: kopf.RawEvent, resource: kopf.Resource, memo: Watches, **_: Any) -> None:
    """Queue the service or policy that owns the object."""
    memo.handle_event(BY_KIND[str(resource.kind)], event["type"], dict(event["object"]))


for kind in OWNED_KINDS:
    if kind.watched:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(owned)
