"""Detect from Events that the API server rejects the pods of a policy.

The operator watches only the metadata of these Events. When one changes, it reads the Event and its
owner in full.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.refused_creations import (
    EVENT_FIELDS,
    RefusedCreation,
    find_owner_kind,
    find_supervisor_refusal,
    parse_refusal_event,
)
from plimsoll_operator.kinds import EVENT, Key, Object
from plimsoll_operator.render.containers import Images
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.reflector import Reflector

log = logging.getLogger(__name__)

EVENT_KINDS = tuple(replace(EVENT, fields=fields) for fields in EVENT_FIELDS)
REFUSAL_VALID_S = 60.0
"""Seconds for which a rejection counts; the pod's owner tries again within this time."""
MAX_EVENTS_PER_READ = 400
"""Maximum number of Events that are read from a namespace in one request."""
MAX_CACHED_OWNERS = 256


@dataclass
class _NamespaceEvents:
    tasks: list[asyncio.Task[None]]
    policies: set[Key] = field(default_factory=set)
    refusals: list[tuple[RefusedCreation, Object]] = field(default_factory=list)
    on_change: bool = True


class RefusedCreationWatch:
    """Watches for rejected pods; ``on_change`` is called with each policy in their namespace."""

    def __init__(
        self, api: Api, images: Images, on_change: Callable[[Key], None], clock: Callable[[], str]
    ) -> None:
        self._api, self._images, self._on_change, self._clock = api, images, on_change, clock
        self._namespaces: dict[str, _NamespaceEvents] = {}
        self._owners: OrderedDict[str, Object] = OrderedDict()

    def forget(self, key: Key) -> None:
        """Stop watching for a deleted policy."""
        known = self._namespaces.get(key.namespace)
        if known is not None:
            known.policies.discard(key)
            if not known.policies:
                for task in known.tasks:
                    task.cancel()
                del self._namespaces[key.namespace]

    async def list_recent(
        self, key: Key, policy: SupervisionPolicy, created: str
    ) -> tuple[RefusedCreation, ...]:
        """Return recent rejections that the policy's supervisor may cause, oldest first.

        ``created`` is the policy's creation time in RFC 3339. Raises ApiError, OSError or
        TimeoutError if a request to the API server fails.
        """
        known = self._watch(key)
        if known.on_change:
            known.on_change = False
            try:
                known.refusals = await self._read(key.namespace)
            except BaseException:
                known.on_change = True
                raise
        rejections, now = [], self._clock()
        for refused, event in known.refusals:
            if (
                refused.reported_at < created
                or compute_seconds_between(refused.reported_at, now) > REFUSAL_VALID_S
            ):
                continue
            owner = await self._read_owner(key.namespace, event)
            if owner is not None and (
                by_supervisor := find_supervisor_refusal(refused, owner, policy, self._images)
            ):
                rejections.append(by_supervisor)
        return tuple(sorted(rejections, key=lambda rejection: rejection.reported_at))

    def _watch(self, key: Key) -> _NamespaceEvents:
        known = self._namespaces.get(key.namespace)
        if known is None:
            reflectors = [
                Reflector(
                    self._api,
                    events,
                    key.namespace,
                    lambda _: self._notify(key.namespace),
                    lambda _, gone: None if gone else self._notify(key.namespace),
                )
                for events in EVENT_KINDS
            ]
            known = _NamespaceEvents([asyncio.create_task(one.run()) for one in reflectors])
            self._namespaces[key.namespace] = known
        known.policies.add(key)
        return known

    def _notify(self, namespace: str) -> None:
        known = self._namespaces.get(namespace)
        if known is not None:
            known.on_change = True
            for key in known.policies:
                self._on_change(key)

    async def _read(self, namespace: str) -> list[tuple[RefusedCreation, Object]]:
        rejections: list[tuple[RefusedCreation, Object]] = []
        for events in EVENT_KINDS:
            count = 0
            async for page, _ in self._api.list_pages(events, namespace):
                count += len(page)
                rejections += [
                    (one, event)
                    for event in page
                    if (one := parse_refusal_event(event)) and one.reported_at
                ]
                if count >= MAX_EVENTS_PER_READ:
                    break
        return rejections

    async def _read_owner(self, namespace: str, event: Object) -> Object | None:
        reference, kind = event["involvedObject"], find_owner_kind(event)
        if kind is None:
            return None
        name, uid = str(reference.get("name")), str(reference.get("uid"))
        cache_key = f"{uid}/{reference.get('resourceVersion')}"
        if cache_key in self._owners:
            self._owners.move_to_end(cache_key)
            return self._owners[cache_key]
        try:
            owner = await self._api.get(kind, namespace, name)
        except ApiError as error:
            if not error.is_lasting:
                raise
            log.warning("failed to read %s %s/%s: %s", kind.kind, namespace, name, error)
            return None
        if owner is None or owner["metadata"].get("uid") != uid:
            return None
        self._owners[cache_key] = {"apiVersion": reference["apiVersion"], "kind": kind.kind} | {
            part: owner.get(part) for part in ("metadata", "spec")
        }
        if len(self._owners) > MAX_CACHED_OWNERS:
            self._owners.popitem(last=False)
        return self._owners[cache_key]
