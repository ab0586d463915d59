"""What the operator has seen of the cluster, by service. Fed by watches, lists and own writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from plimsoll_api.inferenceservice import KIND as SERVICE_KIND
from plimsoll_operator.kinds import Object, Ref, ref
from plimsoll_operator.render.names import SERVICE_LABEL


class Key(NamedTuple):
    """One InferenceService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(item: Object) -> Key | None:
    """The service that ``item`` belongs to; None where it belongs to none."""
    meta = item["metadata"]
    namespace = meta.get("namespace") or ""
    if item["kind"] == SERVICE_KIND:
        return Key(namespace, meta["name"])
    if item["kind"] == "LeakIncident":
        return Key(namespace, item["spec"]["service"])
    for owner in meta.get("ownerReferences") or ():
        if owner.get("kind") == SERVICE_KIND:
            return Key(namespace, owner["name"])
    name = (meta.get("labels") or {}).get(SERVICE_LABEL)
    return Key(namespace, name) if name else None


class Store:
    """Newest known version of each object."""

    def __init__(self) -> None:
        self._objects: dict[Key, dict[Ref, Object]] = {}
        self._gone: set[str] = set()

    def put(self, item: Object) -> Key | None:
        """Takes ``item`` in unless a newer version is known; returns its service."""
        key = key_of(item)
        if key is None:
            return None
        known = self._objects.setdefault(key, {})
        before = known.get(ref(item))
        if before is None or not _older(item, before):
            known[ref(item)] = item
        return key

    def drop(self, item: Object) -> Key | None:
        """Forgets ``item``, unless another object has its name by now; returns its service."""
        key = key_of(item)
        if key is None:
            return None
        self._gone.add(item["metadata"].get("uid", ""))
        known = self._objects.get(key, {})
        before = known.get(ref(item))
        if before and before["metadata"].get("uid") == item["metadata"].get("uid"):
            del known[ref(item)]
        if not known:
            self._objects.pop(key, None)
        return key

    def begin_listing(self) -> None:
        """What is deleted from now on is not taken back in by :meth:`replace`."""
        self._gone = set()

    def replace(self, kind: str, items: Iterable[Object], version: str) -> int:
        """Takes a list of all objects of ``kind`` in, which was current at ``version``; returns
        how many of them were not known, or known in an older version.

        Objects that are newer than the list stay: watches go on while it is read.
        """
        listed: set[tuple[Key, Ref]] = set()
        behind = 0
        for item in items:
            key = key_of(item)
            if key is None or item["metadata"].get("uid") in self._gone:
                continue
            listed.add((key, ref(item)))
            before = self.get(key, ref(item))
            behind += before is None or _older(before, item)
            self.put(item)
        for key in self.keys():
            for where, item in list(self._objects[key].items()):
                stale = where.kind == kind and (key, where) not in listed
                if stale and not _after(item, version):
                    self.drop(item)
                    behind += 1
        return behind

    def get(self, key: Key, wanted: Ref) -> Object | None:
        """One object of a service."""
        return self._objects.get(key, {}).get(wanted)

    def service(self, key: Key) -> Object | None:
        """The InferenceService itself."""
        return self.get(key, Ref(SERVICE_KIND, key.name))

    def of(self, key: Key) -> list[Object]:
        """All objects of a service."""
        return list(self._objects.get(key, {}).values())

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind, of all services."""
        return [
            item for known in self._objects.values() for where, item in known.items()
            if where.kind == kind
        ]  # fmt: skip

    def keys(self) -> list[Key]:
        """All services, also those of which only leftovers are known."""
        return list(self._objects)

    def services(self) -> list[Key]:
        """Services whose InferenceService exists."""
        return [key for key in self.keys() if self.service(key)]


def _after(item: Object, version: str) -> bool:
    """Whether ``item`` was written after ``version``."""
    own = str(item["metadata"].get("resourceVersion", ""))
    return own.isdigit() and version.isdigit() and int(own) > int(version)


def _older(item: Object, than: Object) -> bool:
    """Of two versions of one object the lower resource version is older (comparable since 1.35,
    and in fact always: they are etcd revisions). Another uid is another object."""
    if item["metadata"].get("uid") != than["metadata"].get("uid"):
        return False
    versions = [str(one["metadata"].get("resourceVersion", "")) for one in (item, than)]
    if not all(version.isdigit() for version in versions):
        return False
    return int(versions[0]) < int(versions[1])
