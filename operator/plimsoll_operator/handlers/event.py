"""Writes Events on InferenceServices: one for each thing that happens, counted where it repeats.

An Event is for people who look on: where it cannot be written, nothing else may suffer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plimsoll_operator.kinds import EVENT, Object
from plimsoll_operator.render.deployment import digest
from plimsoll_operator.render.names import MANAGER
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.status.causes import clean
from plimsoll_operator.status.crashes import seconds
from plimsoll_operator.status.notices import Notice

log = logging.getLogger(__name__)

MAX_KNOWN = 1024
QUIET_S = 600.0
"""The same Event again within this time is only counted: a refusal repeats with each try."""

MAX_MESSAGE = 1000


@dataclass
class _Seen:
    count: int
    first: str
    written: str


class Recorder:
    """``clock`` gives RFC 3339."""

    def __init__(self, api: Api, clock: Callable[[], str]) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[str, _Seen] = OrderedDict()

    async def write(self, service: Object, notices: Iterable[Notice]) -> None:
        """One Event a notice, under a name that is the same whenever it repeats."""
        for notice in notices:
            body = self._event(service, notice)
            if body is None:
                continue
            try:
                await self._api.apply(EVENT, body)
            except (ApiError, OSError, TimeoutError) as error:
                name = f"{body['metadata']['namespace']}/{service['metadata']['name']}"
                log.warning("%s: Event %s: %s", name, notice.reason, error or repr(error))

    def _event(self, service: Object, notice: Notice) -> Object | None:
        """Build the Event; None if the same one was written just now."""
        meta, now = service["metadata"], self._clock()
        message = clean(notice.message, MAX_MESSAGE)
        key = digest([meta["uid"], notice.type, notice.reason, message])
        seen = self._known.setdefault(key, _Seen(0, now, ""))
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        seen.count += 1
        if seen.written and seconds(seen.written, now) < QUIET_S:
            return None
        seen.written = now
        return {
            "apiVersion": "v1",
            "kind": EVENT.kind,
            "metadata": {"name": f"{meta['name']}.{key}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": service["apiVersion"],
                "kind": service["kind"],
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": message,
            "count": seen.count,
            "firstTimestamp": seen.first,
            "lastTimestamp": now,
            "source": {"component": MANAGER},
            "reportingComponent": f"plimsoll.dev/{MANAGER}",
        }
