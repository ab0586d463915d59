"""Handle events of objects that the operator created, to revert changes by others."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator.kinds import KINDS_BY_NAME, OWNED_KINDS
from plimsoll_operator.runtime.watches import Watches, registry


async def handle_owned_object(
    event: kopf.RawEvent, resource: kopf.Resource, memo: Watches, **_: Any
) -> None:
    """Queue the service or policy that owns the object."""
    memo.handle_event(KINDS_BY_NAME[str(resource.kind)], event["type"], dict(event["object"]))


for kind in OWNED_KINDS:
    if kind.watched:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(handle_owned_object)
