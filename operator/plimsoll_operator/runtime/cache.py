"""Cache of objects by service, filled by watches, lists and the operator's own writes."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

from plimsoll_operator.kinds import INCIDENT, POLICY, SERVICE, Key, Object, Ref, key_of, ref


class _CompressedObject(NamedTuple):
    """Stored object: UID, resource version, and the compressed object.

    A service with its ten children takes 115 KiB as Python objects, and 9 KiB compressed.
    """

    uid: str
    version: str
    packed: bytes

    @classmethod
    def compress(cls, item: Object) -> _CompressedObject:
        meta = item["metadata"]
        packed = zlib.compress(msgspec.json.encode(item), level=1)
        return cls(meta.get("uid", ""), str(meta.get("resourceVersion", "")), packed)

    @property
    def item(self) -> Object:
        found: Object = msgspec.json.decode(zlib.decompress(self.packed))
        return found

    def has_version(self, meta: Object) -> bool:
        """Report whether this is the version in the metadata ``meta``."""
        return self.uid == meta.get("uid", "") and self.version == str(meta.get("resourceVersion"))

    def is_older(self, than: _CompressedObject) -> bool:
        """Report whether this is an older version of the same object (UID).

        Resource versions are comparable: officially since 1.35, and before that in fact, as etcd
        revisions.
        """
        if self.uid != than.uid or not (self.version.isdigit() and than.version.isdigit()):
            return False
        return int(self.version) < int(than.version)

    def is_after(self, version: str) -> bool:
        """Report whether the object was written after the resource version ``version``."""
        digits = self.version.isdigit() and version.isdigit()
        return digits and int(self.version) > int(version)


class Listed(NamedTuple):
    """Compressed object of a list."""

    key: Key
    where: Ref
    kept: _CompressedObject


OWNERS = (SERVICE.kind, POLICY.kind)
MAX_OWNED_BYTES = 16 << 20
"""Maximum compressed size of the objects of a service or policy; enough for some thousand pods."""

MAX_PASSED_OVER = 10_000


class Store:
    """Newest known version of each object. Callers get copies.

    Anyone may create objects with our labels. So an object from a watch or a list is stored only if
    it is :meth:`is_expected`: its owner must be known and below its size limit.

    ``changes`` counts stored and removed objects by kind.
    """

    def __init__(self) -> None:
        self._objects: dict[Key, dict[Ref, _CompressedObject]] = {}
        self._gone: set[str] = set()
        self._bytes: Counter[Key] = Counter()
        self._passed_over: tuple[set[Key], set[Key]] = (set(), set())
        """Keys of unexpected objects: from before the current list, and since it began."""
        self.changes: Counter[str] = Counter()

    def is_expected(self, item: Object, owners: Container[Key] = ()) -> bool:
        """Report whether ``item`` is a service, policy or incident, or belongs to a known one.

        ``owners`` are known in addition to the stored ones.
        """
        key = key_of(item)
        if key is None or item["kind"] in OWNERS or item["kind"] == INCIDENT.kind:
            return key is not None
        known = self._objects.get(key, {})
        owned = Ref(key.kind, key.name) in known or key in owners
        return ref(item) in known or (owned and self._bytes[key] < MAX_OWNED_BYTES)

    def pass_over(self, item: Object) -> None:
        """Record that ``item`` is not stored, so that a later list does not count it as missed.

        Otherwise, objects created before their owner would make a working watch look stale.
        """
        key = key_of(item)
        if key is not None and len(self._passed_over[1]) < MAX_PASSED_OVER:
            self._passed_over[1].add(key)

    def has_version(self, item: Object) -> bool:
        """Report whether this version of ``item`` is stored."""
        key = key_of(item)
        kept = self._objects.get(key, {}).get(ref(item)) if key is not None else None
        return kept is not None and kept.has_version(item["metadata"])

    def put(self, item: Object) -> Key | None:
        """Store ``item`` unless a newer version is stored; return its service."""
        key = key_of(item)
        if key is not None:
            self._put(key, ref(item), _CompressedObject.compress(item))
        return key

    def _put(self, key: Key, where: Ref, fresh: _CompressedObject) -> None:
        known = self._objects.setdefault(key, {})
        before = known.get(where)
        if before is None or not fresh.is_older(before):
            known[where] = fresh
            self._bytes[key] += len(fresh.packed) - (len(before.packed) if before else 0)
            self.changes[where.kind] += 1

    def remove(self, item: Object) -> Key | None:
        """Remove ``item`` unless its name now belongs to another object; return its service."""
        key = key_of(item)
        if key is not None:
            self._remove(key, ref(item), item["metadata"].get("uid", ""))
        return key

    def _remove(self, key: Key, where: Ref, uid: str) -> None:
        self._gone.add(uid)
        known = self._objects.get(key, {})
        before = known.get(where)
        if before and before.uid == uid:
            del known[where]
            self._bytes[key] -= len(before.packed)
            self.changes[where.kind] += 1
        if not known:
            self._objects.pop(key, None)
            self._bytes.pop(key, None)

    def begin_listing(self) -> None:
        """Begin a list; :meth:`replace` does not restore objects that are deleted from now on."""
        self._gone = set()
        self._passed_over = (self._passed_over[1], set())

    def listed(self, items: Iterable[Object], owners: Container[Key] = ()) -> list[Listed]:
        """Compress the objects of a list for :meth:`replace`; reuse those that are stored.

        ``owners`` were listed before.
        """
        found = []
        for item in items:
            key = key_of(item)
            if key is not None and self.is_expected(item, owners):
                where = ref(item)
                before = self._objects.get(key, {}).get(where)
                if before is None or not before.has_version(item["metadata"]):
                    before = _CompressedObject.compress(item)
                found.append(Listed(key, where, before))
            else:
                self.pass_over(item)
        return found

    def replace(self, kind: str, items: Iterable[Listed], version: str) -> int:
        """Replace the stored objects of ``kind`` with a complete list at this resource version.

        Returns the number of objects that were missing in the store, outdated, or deleted since.
        Stored objects that are newer than the list stay, because watches continue while the list is
        read.
        """
        listed: set[tuple[Key, Ref]] = set()
        present: set[str] = set()
        behind = 0
        for key, where, fresh in items:
            if fresh.uid in self._gone:
                continue
            listed.add((key, where))
            present.add(fresh.uid)
            before = self._objects.get(key, {}).get(where)
            if before is None:
                behind += not any(key in some for some in self._passed_over)
            else:
                behind += before.is_older(fresh)
            self._put(key, where, fresh)
        for key in self.known_keys():
            for where, kept in list(self._objects[key].items()):
                stale = where.kind == kind and (key, where) not in listed
                if stale and not kept.is_after(version):
                    self._remove(key, where, kept.uid)
                    behind += (
                        kept.uid not in present
                    )  # not deleted: its labels now name another owner
        return behind

    def get(self, key: Key, wanted: Ref) -> Object | None:
        """Return an object of a service; None if it is not stored."""
        kept = self._objects.get(key, {}).get(wanted)
        return kept.item if kept else None

    def children(self, key: Key, kinds: Container[str]) -> list[Object]:
        """Return a service's objects of the given kinds."""
        known = self._objects.get(key, {}).items()
        return [kept.item for where, kept in known if where.kind in kinds]

    def of_kind(self, kind: str) -> list[Object]:
        """Return the objects of a kind of all services."""
        return [
            kept.item
            for known in self._objects.values()
            for where, kept in known.items()
            if where.kind == kind
        ]

    def count(self, kind: str, namespace: str) -> int:
        """Return the number of objects of a kind in a namespace."""
        some = (known for key, known in self._objects.items() if key.namespace == namespace)
        return sum(where.kind == kind for known in some for where in known)

    def known_keys(self) -> list[Key]:
        """Return all services, including those of which only children are stored."""
        return list(self._objects)

    def services(self) -> list[Key]:
        """Return the services whose InferenceService is stored."""
        return [key for key, known in self._objects.items() if Ref(SERVICE.kind, key.name) in known]
