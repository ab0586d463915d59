"""Watch the operator's objects, to fill the cache and the queue.

kopf runs most watches, with the handlers in ``handlers``. Reflectors watch policies and
LeaderWorkerSets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import kopf

from plimsoll_operator.kinds import (
    LEADER_WORKER_SET,
    POLICY,
    WATCHED_KINDS,
    Key,
    Kind,
    Object,
    Ref,
    find_key,
)
from plimsoll_operator.render.names import FIELD_MANAGER
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, replace_managed_fields
from plimsoll_operator.runtime.queue import WorkQueue
from plimsoll_operator.runtime.reflector import Reflector

SERVER_TIMEOUT_S = 300
CLIENT_TIMEOUT_S = 330
LIST_CHUNK_OBJECTS = 100
KOPF_IDLE_S = 0.02

registry = kopf.OperatorRegistry()
"""Registry of the handlers; kopf's default registry would import further client libraries."""


def make_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no Events, annotations, finalizers or namespace discovery."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.posting.loggers = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.watching.server_timeout = SERVER_TIMEOUT_S
    made.watching.client_timeout = CLIENT_TIMEOUT_S
    # kopf keeps each object's event in a task until the task has been idle. With small chunks,
    # whose tasks end immediately, a whole list is never in memory.
    made.watching.chunk_size = LIST_CHUNK_OBJECTS
    made.queueing.idle_timeout = KOPF_IDLE_S
    # Handlers take microseconds, so kopf does not have to wait for them on exit.
    made.queueing.exit_timeout = 0.5
    made.persistence.finalizer = f"plimsoll.dev/{FIELD_MANAGER}"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="kopf.plimsoll.dev")
    made.persistence.diffbase_storage = _NoDiffs()
    for kind in WATCHED_KINDS:
        if kind.selector:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    return made


# No handler needs a diff. The default storage copies each object, which would take a third of the
# CPU time.
class _NoDiffs(kopf.DiffBaseStorage):
    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    # The default storage would annotate the watched objects.
    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None: ...


class Watches:
    """State that kopf passes to each handler as its memo: the cache, the queue and event times."""

    def __init__(self, store: Store, queue: WorkQueue[Key]) -> None:
        self._store, self._queue = store, queue
        began = time.monotonic()
        self._last = {kind.kind: began for kind in WATCHED_KINDS}
        self._misses: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.listing = asyncio.Event()
        """Set when kopf starts a watch, because earlier deletions cause no event."""
        self.listing.set()  # kopf has not made its first lists yet
        self.events = 0

    @property
    def age_s(self) -> float:
        """Seconds since the last event of any kind."""
        return min(self.compute_ages_s().values())

    def compute_ages_s(self) -> dict[str, float]:
        """Return the seconds since the last event, by kind."""
        now = time.monotonic()
        return {kind: now - last for kind, last in self._last.items()}

    def count_missed(self, kind: str, missed: int) -> None:
        """Record that a full list of ``kind`` showed ``missed`` changes without an event."""
        self.missed[kind] += missed
        self._misses[kind] = self._misses[kind] + 1 if missed else 0

    def list_stale_kinds(self, list_count: int) -> list[str]:
        """Return the kinds with missed events in each of the last ``list_count`` lists."""
        return sorted(kind for kind, count in self._misses.items() if count >= list_count)

    # kopf copies the memo for each object.
    def __copy__(self) -> Watches:
        return self

    def handle_event(self, kind: Kind, event: str | None, item: Object) -> None:
        """Store the object of an event, and queue its service or policy.

        ``event`` is None for an object from the list that starts a watch.
        """
        if kind.watched:
            self._last[kind.kind] = time.monotonic()
        self.events += 1
        if event is None:
            self.listing.set()
        item |= {"apiVersion": kind.api_version, "kind": kind.kind}
        gone = event == "DELETED"
        if not gone and self._store.has_version(item):
            return
        if not gone and not self._store.is_expected(item):
            self._store.record_unstored(item)
            return
        item["metadata"] = replace_managed_fields(item["metadata"])
        key = self._store.remove(item) if gone else self._store.put(item)
        if key is not None:
            self._queue.add(key)


async def _run_reflectors(reflectors: Sequence[Reflector]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in reflectors:
            group.create_task(one.run())


class PolicyWatch:
    """Watch of the policies in every replica, because a standby does not run kopf.

    ``on_change`` is called with each changed policy, and with True if it was deleted.
    """

    def __init__(self, api: Api, store: Store, watches: Watches, namespaces: Sequence[str]) -> None:
        self._store, self._watches = store, watches
        self._reflectors = [
            Reflector(
                api, POLICY, one, partial(self._on_list, one), self._on_event, complete_objects=True
            )
            for one in namespaces or (None,)
        ]
        self.on_change: Callable[[Object, bool], None] = lambda *_: None

    def is_current(self) -> bool:
        """Report whether all policies are known and the watch works."""
        return all(one.tried.is_set() and one.error is None for one in self._reflectors)

    async def run(self) -> None:
        """Watch until cancelled."""
        await _run_reflectors(self._reflectors)

    def _on_list(self, namespace: str | None, items: list[Object]) -> None:
        present = {find_key(item) for item in items}
        for key in self._store.list_known_keys():
            if key.kind == POLICY.kind and namespace in (None, key.namespace):
                known = self._store.get(key, Ref(POLICY.kind, key.name))
                if known is not None and key not in present:
                    self._on_event(known, deleted=True)
        for item in items:
            self._on_event(item, deleted=False)

    def _on_event(self, item: Object, deleted: bool) -> None:
        self._watches.handle_event(POLICY, "DELETED" if deleted else "MODIFIED", item)
        self.on_change(item, deleted)


class GroupWatch:
    """Watch of the services' LeaderWorkerSets, which starts once ``kind_served`` is set."""

    def __init__(
        self, api: Api, watches: Watches, namespaces: Sequence[str], kind_served: asyncio.Event
    ) -> None:
        self._watches, self._kind_served = watches, kind_served
        self._reflectors = [
            Reflector(
                api, LEADER_WORKER_SET, one, self._on_list, self._on_event, complete_objects=True
            )
            for one in namespaces or (None,)
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._kind_served.wait()
        await _run_reflectors(self._reflectors)

    def _on_list(self, items: list[Object]) -> None:
        for item in items:
            self._on_event(item, deleted=False)

    def _on_event(self, item: Object, deleted: bool) -> None:
        self._watches.handle_event(LEADER_WORKER_SET, "DELETED" if deleted else "MODIFIED", item)


class Login(kopf.ConnectionInfo):
    """Login that verifies the API server's certificate as kubectl does.

    Python 3.13 also requires key identifiers, which many CAs lack, such as those of EKS.
    """

    def as_ssl_context(self) -> ssl.SSLContext:
        """Return kopf's context without VERIFY_X509_STRICT."""
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    @classmethod
    def from_connection(cls, connection: kopf.ConnectionInfo) -> Login:
        """Convert kopf's login ``connection`` to a :class:`Login`."""
        return cls(
            **{
                field.name: getattr(connection, field.name)
                for field in dataclasses.fields(connection)
            }
        )


def login_in_pod(**kopf_arguments: Any) -> Login | None:
    """Log in with the pod's service account, or else with the user's default kubeconfig."""
    account = kopf.login_with_service_account(**kopf_arguments)
    return (
        Login.from_connection(use_ip_address(account, os.environ))
        if account
        else login_with_kubeconfig(**kopf_arguments)
    )


def use_ip_address(account: kopf.ConnectionInfo, environ: Mapping[str, str]) -> kopf.ConnectionInfo:
    """Return ``account`` with the API server's IP address from the container's environment.

    With a host name, no watch would start without the cluster's DNS.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        return account
    host = f"[{host}]" if ":" in host else host
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    return dataclasses.replace(account, server=f"https://{host}:{port}")


def login_with_kubeconfig(**kopf_arguments: Any) -> Login | None:
    """Log in with the kubeconfig in ``KUBECONFIG``; return None if there is none."""
    connection = kopf.login_with_kubeconfig(**kopf_arguments)
    return Login.from_connection(connection) if connection else None
