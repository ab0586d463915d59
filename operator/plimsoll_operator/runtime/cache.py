"""Cache of objects by service or policy, filled by watches, lists and the operator's own writes."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

from plimsoll_operator.kinds import INCIDENT, POLICY, SERVICE, Key, Object, Ref, find_key, make_ref


# A service with ten owned objects takes 115 KiB as Python objects, and 9 KiB compressed.
class _CompressedObject(NamedTuple):
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
        return self.uid == meta.get("uid", "") and self.version == str(meta.get("resourceVersion"))

    # Resource versions are compared as numbers: officially since Kubernetes 1.35, and as etcd
    # revisions in earlier versions.
    def is_older(self, other: _CompressedObject) -> bool:
        if self.uid != other.uid or not (self.version.isdigit() and other.version.isdigit()):
            return False
        return int(self.version) < int(other.version)

    def is_newer_than(self, version: str) -> bool:
        digits = self.version.isdigit() and version.isdigit()
        return digits and int(self.version) > int(version)


class ListedObject(NamedTuple):
    """Compressed object from a list."""

    key: Key
    ref: Ref
    compressed: _CompressedObject


OWNER_KINDS = (SERVICE.kind, POLICY.kind)
MAX_OWNED_BYTES = 16 << 20
"""Maximum compressed size of a service's or policy's objects: several thousand pods."""

MAX_UNSTORED_KEYS = 10_000


class Store:
    """Cache of the newest known version of each object; callers get copies.

    Anyone may create objects with Plimsoll's labels, so the cache stores only objects that
    :meth:`is_expected` accepts. ``changes`` counts stored and removed objects by kind.
    """

    def __init__(self) -> None:
        self._objects: dict[Key, dict[Ref, _CompressedObject]] = {}
        self._gone: set[str] = set()
        self._bytes: Counter[Key] = Counter()
        self._unstored_keys: tuple[set[Key], set[Key]] = (set(), set())
        """Keys of unexpected objects from before and after the start of the current list."""
        self.changes: Counter[str] = Counter()

    def is_expected(self, item: Object, owners: Container[Key] = ()) -> bool:
        """Report whether ``item`` is a service, policy or incident, or belongs to a known owner.

        An owner is known if it is in the cache or in ``owners``. Beyond :data:`MAX_OWNED_BYTES`,
        none of its new objects are expected.
        """
        key = find_key(item)
        if key is None or item["kind"] in OWNER_KINDS or item["kind"] == INCIDENT.kind:
            return key is not None
        objects_by_ref = self._objects.get(key, {})
        owned = Ref(key.kind, key.name) in objects_by_ref or key in owners
        return make_ref(item) in objects_by_ref or (owned and self._bytes[key] < MAX_OWNED_BYTES)

    def record_unstored(self, item: Object) -> None:
        """Record that the watch reported ``item``, so that a list does not count it as missed."""
        key = find_key(item)
        if key is not None and len(self._unstored_keys[1]) < MAX_UNSTORED_KEYS:
            self._unstored_keys[1].add(key)

    def has_version(self, item: Object) -> bool:
        """Report whether this version of ``item`` is stored."""
        key = find_key(item)
        compressed = self._objects.get(key, {}).get(make_ref(item)) if key is not None else None
        return compressed is not None and compressed.has_version(item["metadata"])

    def put(self, item: Object) -> Key | None:
        """Store ``item`` unless a newer version is stored; return its owner's key, or None."""
        key = find_key(item)
        if key is not None:
            self._put(key, make_ref(item), _CompressedObject.compress(item))
        return key

    def _put(self, key: Key, ref: Ref, item: _CompressedObject) -> None:
        objects_by_ref = self._objects.setdefault(key, {})
        previous = objects_by_ref.get(ref)
        if previous is None or not item.is_older(previous):
            objects_by_ref[ref] = item
            self._bytes[key] += len(item.packed) - (len(previous.packed) if previous else 0)
            self.changes[ref.kind] += 1

    def remove(self, item: Object) -> Key | None:
        """Remove ``item`` unless a new object has its name; return its owner's key, or None."""
        key = find_key(item)
        if key is not None:
            self._remove(key, make_ref(item), item["metadata"].get("uid", ""))
        return key

    def _remove(self, key: Key, ref: Ref, uid: str) -> None:
        self._gone.add(uid)
        objects_by_ref = self._objects.get(key, {})
        before = objects_by_ref.get(ref)
        if before and before.uid == uid:
            del objects_by_ref[ref]
            self._bytes[key] -= len(before.packed)
            self.changes[ref.kind] += 1
        if not objects_by_ref:
            self._objects.pop(key, None)
            self._bytes.pop(key, None)

    def begin_listing(self) -> None:
        """Mark the start of a list; :meth:`replace` restores no objects that are deleted later."""
        self._gone = set()
        self._unstored_keys = (self._unstored_keys[1], set())

    def compress_listed(
        self, items: Iterable[Object], owners: Container[Key] = ()
    ) -> list[ListedObject]:
        """Compress listed objects for :meth:`replace`, and skip those that are not expected.

        ``owners`` are the services and policies that are already listed.
        """
        compressed = []
        for item in items:
            key = find_key(item)
            if key is not None and self.is_expected(item, owners):
                ref = make_ref(item)
                stored = self._objects.get(key, {}).get(ref)
                if stored is None or not stored.has_version(item["metadata"]):
                    stored = _CompressedObject.compress(item)
                compressed.append(ListedObject(key, ref, stored))
            else:
                self.record_unstored(item)
        return compressed

    def replace(self, kind: str, items: Iterable[ListedObject], version: str) -> int:
        """Replace the stored objects of ``kind`` with a complete list at this resource version.

        Keep newer stored objects. Return the number of changes that the store had missed.
        """
        listed: set[tuple[Key, Ref]] = set()
        present: set[str] = set()
        missed = 0
        for key, ref, fresh in items:
            if fresh.uid in self._gone:
                continue
            listed.add((key, ref))
            present.add(fresh.uid)
            stored = self._objects.get(key, {}).get(ref)
            if stored is None:
                missed += not any(key in some for some in self._unstored_keys)
            else:
                missed += stored.is_older(fresh)
            self._put(key, ref, fresh)
        for key in self.list_known_keys():
            for ref, compressed in list(self._objects[key].items()):
                stale = ref.kind == kind and (key, ref) not in listed
                if stale and not compressed.is_newer_than(version):
                    self._remove(key, ref, compressed.uid)
                    missed += (
                        compressed.uid not in present
                    )  # otherwise it still exists, with labels of another owner
        return missed

    def get(self, key: Key, ref: Ref) -> Object | None:
        """Return an object of a service or policy; None if it is not stored."""
        stored = self._objects.get(key, {}).get(ref)
        return stored.item if stored else None

    def list_children(self, key: Key, kinds: Container[str]) -> list[Object]:
        """Return the objects of the given kinds that belong to a service or policy."""
        entries = self._objects.get(key, {}).items()
        return [compressed.item for ref, compressed in entries if ref.kind in kinds]

    def list_kind(self, kind: str) -> list[Object]:
        """Return all stored objects of a kind."""
        return [
            compressed.item
            for objects_by_ref in self._objects.values()
            for ref, compressed in objects_by_ref.items()
            if ref.kind == kind
        ]

    def count(self, kind: str, namespace: str) -> int:
        """Return the number of stored objects of a kind in a namespace."""
        some = (
            objects_by_ref
            for key, objects_by_ref in self._objects.items()
            if key.namespace == namespace
        )
        return sum(ref.kind == kind for objects_by_ref in some for ref in objects_by_ref)

    def list_known_keys(self) -> list[Key]:
        """Return the keys of all services and policies with a stored object, even if deleted."""
        return list(self._objects)

    def list_services(self) -> list[Key]:
        """Return the keys of the stored InferenceServices."""
        return [
            key
            for key, objects_by_ref in self._objects.items()
            if Ref(SERVICE.kind, key.name) in objects_by_ref
        ]
