"""What the operator writes for a service or a policy: its objects and its status.

:class:`Refusals` says what it means for the status if that fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from plimsoll_operator.kinds import BY_KIND, Key, Kind, Object, owner_uid, ref
from plimsoll_operator.plan import InvalidSpec
from plimsoll_operator.render.compare import needs_apply, with_replicas
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, Conflict
from plimsoll_operator.status.conditions import Failure

log = logging.getLogger(__name__)

REPORT_AFTER = 3
"""A refusal that may pass goes into the status once it came this often in a row."""


class NameConflict(Exception):
    """An object that is somebody else's has the name of one of ours."""

    def __init__(self, item: Object) -> None:
        owner = item["metadata"]["ownerReferences"][0]["kind"]
        super().__init__(
            f"{item['kind']} {item['metadata']['namespace']}/{item['metadata']['name']} exists and "
            f"does not belong to this {owner}: delete it, or rename the {owner}"
        )


class OwnedObjects:
    """Write what a plan says about the objects of a service."""

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store

    async def apply(self, key: Key, uid: str, desired: Object, first_replicas: int) -> bool:
        """Make one object what it should be; return False where it already is.

        ``uid`` is the service's. An object that is not ours carries no label of ours and is in no
        watch, so a first application must find nothing: nothing is taken over.
        :class:`NameConflict` where somebody else's object has the name.
        """
        kind, live = BY_KIND[desired["kind"]], self._store.get(key, ref(desired))
        if live is not None and owner_uid(live) != uid:
            raise NameConflict(desired)
        if live is not None and not needs_apply(desired, live):
            return False
        log.info("%s: apply %s", key, " ".join(ref(desired)))
        whole = with_replicas(desired, live, first_replicas)
        try:
            send = self._api.apply if live is not None else self._api.apply_new
            self._store.put(await send(kind, whole))
        except Conflict:
            found = await self._api.get(kind, key.namespace, desired["metadata"]["name"])
            if found is not None and owner_uid(found) != uid:
                raise NameConflict(desired) from None
            if found is not None:
                self._store.put(found)
            raise  # the object that is there now may change the plan
        return True

    async def remove(self, key: Key, surplus: Sequence[Object]) -> None:
        """Delete objects, unless they changed since they were seen: a Lease was taken."""
        for item in surplus:
            log.info("%s: delete %s", key, " ".join(ref(item)))
            if await self._api.delete(BY_KIND[item["kind"]], item):
                self._store.drop(item)


async def write_status(api: Api, store: Store, kind: Kind, item: Object, wanted: Object) -> bool:
    """Give ``item`` the status ``wanted``; return False if it was deleted meanwhile.

    ApiError where the API server refuses.
    """
    meta = item["metadata"]
    body = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "status": wanted,
    }
    try:
        store.put(await api.apply(kind, body, "status"))
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


class Refusals:
    """Why services and policies were not carried out, and how often in a row."""

    def __init__(self) -> None:
        self._in_a_row: Counter[Key] = Counter()

    def judge(
        self, key: Key, problem: InvalidSpec | NameConflict | ApiError
    ) -> tuple[Failure, Exception | None]:
        """Return what the status says, and the error to raise after it is written, if any.

        Raises ``problem`` itself while it may pass: it comes again at once, and a status that
        flickers helps nobody.
        """
        if isinstance(problem, InvalidSpec):
            return Failure("InvalidSpec", str(problem), lasting=True), None
        if isinstance(problem, NameConflict):
            return Failure("NameConflict", str(problem), lasting=True), problem
        self._in_a_row[key] += 1
        if not problem.lasting and self._in_a_row[key] < REPORT_AFTER:
            raise problem
        return Failure("ApplyFailed", problem.message, problem.lasting), problem

    def forget(self, key: Key) -> None:
        """Begin to count anew: the service was carried out, or is gone."""
        self._in_a_row.pop(key, None)
