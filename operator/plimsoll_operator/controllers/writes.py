"""Write the objects, status and Events of a service or a policy."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.kinds import (
    CLAIM,
    EVENT,
    KINDS_BY_NAME,
    InvalidSpecError,
    Key,
    Kind,
    Object,
    Ref,
    get_owner_uid,
    make_ref,
)
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.render.compare import (
    add_current_replicas,
    get_owned_fields_hash,
    needs_apply,
)
from plimsoll_operator.render.names import FIELD_MANAGER, compute_digest
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError
from plimsoll_operator.status.events import Notice

log = logging.getLogger(__name__)

REPORT_AFTER_FAILURES = 3
"""Number of consecutive transient failures after which the status shows the failure."""

MAX_CACHED_EVENTS = 1024
CLAIM_CACHE_S = 600.0
"""Seconds for which a claim's access modes are cached; a new claim may get the same name."""
EVENT_DEDUPLICATION_S = 600.0
"""Seconds within which a repeated Event is not written again."""

MAX_MESSAGE_CHARS = 1000
OWNER_KEYS = ("apiVersion", "kind", "name")
"""Fields of an owner reference that are the same for a deleted owner and its successor."""


class NameConflictError(Exception):
    """Raised if a needed object already exists and does not belong to the service or policy.

    ``is_lasting`` is False if it belongs to a deleted service or policy of the same name.
    """

    def __init__(self, item: Object, live: Object) -> None:
        reference = item["metadata"]["ownerReferences"][0]
        owner, name = (
            reference["kind"],
            f"{item['metadata']['namespace']}/{item['metadata']['name']}",
        )
        self.is_lasting = not any(
            one.get("controller") and all(one.get(key) == reference[key] for key in OWNER_KEYS)
            for one in live["metadata"].get("ownerReferences") or ()
        )
        self.message = (
            f"{item['kind']} {name} already exists, but does not belong to this {owner}: delete it,"
            f" or rename the {owner}"
            if self.is_lasting
            else f"{item['kind']} {name} still belongs to the deleted {owner} of the same name:"
            " wait until the garbage collector has deleted it"
        )
        super().__init__(self.message)


class OwnedObjectWriter:
    """Writer of the planned objects of a service or policy.

    It does not apply an object again while the fields that Plimsoll owns are unchanged.
    """

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store
        self._fields: dict[Key, dict[Ref, str]] = {}

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted service or policy."""
        self._fields.pop(key, None)

    async def apply(self, key: Key, uid: str, desired: Object, initial_replicas: int) -> bool:
        """Apply an object. Return False if the object is already up to date.

        ``uid`` is the owner's. ``initial_replicas`` is the replica count of a new workload. Raises
        :class:`NameConflictError` if an object of another owner has the same name.
        """
        kind, live = KINDS_BY_NAME[desired["kind"]], self._store.get(key, make_ref(desired))
        if live is not None and get_owner_uid(live) != uid:
            raise NameConflictError(desired, live)
        hashes_by_ref, ref = self._fields.setdefault(key, {}), make_ref(desired)
        if live is not None and not needs_apply(desired, live, hashes_by_ref.get(ref)):
            _store_fields_hash(hashes_by_ref, ref, get_owned_fields_hash(live, desired))
            return False
        log.info("%s: applying %s", key, " ".join(make_ref(desired)))
        full = add_current_replicas(desired, live, initial_replicas)
        try:
            send = self._api.apply if live is not None else self._api.apply_new
            created = await send(kind, full)
            self._store.put(created)
            _store_fields_hash(hashes_by_ref, ref, get_owned_fields_hash(created, desired))
        except ConflictError:
            existing = await self._api.get(kind, key.namespace, desired["metadata"]["name"])
            if existing is not None and get_owner_uid(existing) != uid:
                raise NameConflictError(desired, existing) from None
            if existing is not None:
                self._store.put(existing)
            raise  # the object that was found may change the plan
        return True

    async def remove(self, key: Key, surplus: Sequence[Object]) -> None:
        """Delete each object unless it has changed since it was read."""
        for item in surplus:
            log.info("%s: deleting %s", key, " ".join(make_ref(item)))
            if await self._api.delete(KINDS_BY_NAME[item["kind"]], item):
                self._store.remove(item)
                self._fields.get(key, {}).pop(make_ref(item), None)


def _store_fields_hash(hashes_by_ref: dict[Ref, str], ref: Ref, fields_hash: str | None) -> None:
    if fields_hash is None:
        hashes_by_ref.pop(ref, None)
    else:
        hashes_by_ref[ref] = fields_hash


async def write_status(api: Api, store: Store, kind: Kind, item: Object, status: Object) -> bool:
    """Write the status of ``item``. Return False if the object no longer exists.

    Raises ApiError if the API server rejects it.
    """
    meta = item["metadata"]
    body = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "status": status,
    }
    try:
        store.put(await api.apply(kind, body, "status"))
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


class FailureCounter:
    """Counter of consecutive failures by service and policy."""

    def __init__(self) -> None:
        self._failures: Counter[Key] = Counter()

    def classify(
        self, key: Key, problem: InvalidSpecError | NameConflictError | ApiError
    ) -> tuple[Failure, Exception | None]:
        """Return the failure for the status, and the error to raise after the status is written.

        The error is None for an invalid spec. Raises ``problem`` itself while it may be transient.
        """
        if isinstance(problem, InvalidSpecError):
            return Failure(problem.reason, str(problem), is_lasting=True), None
        self._failures[key] += 1
        if not problem.is_lasting and self._failures[key] < REPORT_AFTER_FAILURES:
            raise problem
        reason = "NameConflict" if isinstance(problem, NameConflictError) else "ApplyFailed"
        return Failure(reason, problem.message, problem.is_lasting), problem

    def forget(self, key: Key) -> None:
        """Reset the number of failures of ``key``."""
        self._failures.pop(key, None)


class ClaimModeCache:
    """Cache of whether pods on several nodes may mount a claim."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[tuple[str, str], tuple[float, bool]] = OrderedDict()

    async def is_shared(self, namespace: str, name: str) -> bool:
        """Report whether pods on several nodes may mount the claim; False if it cannot be read.

        Raises ApiError if the request may succeed later.
        """
        cached_at, shared = self._known.get((namespace, name), (-CLAIM_CACHE_S, False))
        if self._clock() - cached_at < CLAIM_CACHE_S:
            return shared
        try:
            claim = await self._api.get(CLAIM, namespace, name)
        except ApiError as error:
            if not error.is_lasting:
                raise
            log.warning("failed to read PersistentVolumeClaim %s/%s: %s", namespace, name, error)
            return False
        if claim is None:
            return False
        modes = set((claim.get("spec") or {}).get("accessModes") or ())
        is_shared = "ReadWriteMany" in modes or modes == {"ReadOnlyMany"}
        self._known[namespace, name] = (self._clock(), is_shared)
        if len(self._known) > MAX_CACHED_EVENTS:
            self._known.popitem(last=False)
        return self._known[namespace, name][1]


@dataclass
class _RecordedEvent:
    count: int
    first: str
    written: str


class EventRecorder:
    """Writer of Events; ``clock`` returns the time in RFC 3339."""

    def __init__(self, api: Api, clock: Callable[[], str]) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[str, _RecordedEvent] = OrderedDict()

    async def write(self, service: Object, notices: Iterable[Notice]) -> None:
        """Write an Event for each notice. A repeated notice updates its Event."""
        for notice in notices:
            body = self._make_event(service, notice)
            if body is None:
                continue
            try:
                await self._api.apply(EVENT, body)
            except (ApiError, OSError, TimeoutError) as error:
                name = f"{body['metadata']['namespace']}/{service['metadata']['name']}"
                log.warning(
                    "%s: failed to write Event %s: %s",
                    name,
                    notice.reason,
                    str(error) or repr(error),
                )

    def _make_event(self, service: Object, notice: Notice) -> Object | None:
        """Return the Event; None if it was written less than :data:`EVENT_DEDUPLICATION_S` ago."""
        meta, now = service["metadata"], self._clock()
        message = make_printable_line(notice.message, MAX_MESSAGE_CHARS)
        key = compute_digest([meta["uid"], notice.type, notice.reason, message])
        event = self._known.setdefault(key, _RecordedEvent(0, now, ""))
        self._known.move_to_end(key)
        if len(self._known) > MAX_CACHED_EVENTS:
            self._known.popitem(last=False)
        event.count += 1
        if event.written and compute_seconds_between(event.written, now) < EVENT_DEDUPLICATION_S:
            return None
        event.written = now
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
            "count": event.count,
            "firstTimestamp": event.first,
            "lastTimestamp": now,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": f"plimsoll.dev/{FIELD_MANAGER}",
        }
