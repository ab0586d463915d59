"""What the operator has seen of the cluster, by service. Fed by watches, lists and own writes."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

from plimsoll_operator.kinds import INCIDENT, POLICY, SERVICE, Key, Object, Ref, key_of, ref


class _Packed(NamedTuple):
    """An object as it is kept: what decides which of two versions is newer, and all of it packed.

    As Python objects a service with its ten children takes 115 KiB, packed it takes 9.
    """

    uid: str
    version: str
    packed: bytes

    @classmethod
    def of(cls, item: Object) -> _Packed:
        meta = item["metadata"]
        packed = zlib.compress(msgspec.json.encode(item), level=1)
        return cls(meta.get("uid", ""), str(meta.get("resourceVersion", "")), packed)

    @property
    def item(self) -> Object:
        found: Object = msgspec.json.decode(zlib.decompress(self.packed))
        return found

    def is_of(self, meta: Object) -> bool:
        """Whether this is the version that ``meta``, an object's metadata, is of."""
        return self.uid == meta.get("uid", "") and self.version == str(meta.get("resourceVersion"))

    def older(self, than: _Packed) -> bool:
        """Return whether this is an older version of the same object (uid).

        Resource versions are comparable (officially since 1.35, and in fact always: they are etcd
        revisions).
        """
        if self.uid != than.uid or not (self.version.isdigit() and than.version.isdigit()):
            return False
        return int(self.version) < int(than.version)

    def after(self, version: str) -> bool:
        """Whether it was written after ``version``."""
        digits = self.version.isdigit() and version.isdigit()
        return digits and int(self.version) > int(version)


class Listed(NamedTuple):
    """One object of a list, packed."""

    key: Key
    where: Ref
    kept: _Packed


OWNERS = (SERVICE.kind, POLICY.kind)
MAX_OWNED_BYTES = 16 << 20
"""Packed size of the objects that one service or policy may have: some thousand pods."""

MAX_PASSED_OVER = 10_000


class Store:
    """Newest known version of each object. Callers get copies.

    Anybody may create objects with our labels. So an object of a watch or a list is stored only if
    it is :meth:`expected`: if its owner is known and has room left.

    ``changes`` counts by kind the objects that were stored or forgotten.
    """

    def __init__(self) -> None:
        self._objects: dict[Key, dict[Ref, _Packed]] = {}
        self._gone: set[str] = set()
        self._bytes: Counter[Key] = Counter()
        self._passed_over: tuple[set[Key], set[Key]] = (set(), set())
        """Keys with objects that were not expected: since the list before, and in this one."""
        self.changes: Counter[str] = Counter()

    def expected(self, item: Object, owners: Container[Key] = ()) -> bool:
        """Whether ``item`` is a service, a policy or an incident, or belongs to a known one.

        ``owners`` are known besides those in the store.
        """
        key = key_of(item)
        if key is None or item["kind"] in OWNERS or item["kind"] == INCIDENT.kind:
            return key is not None
        known = self._objects.get(key, {})
        owned = Ref(key.kind, key.name) in known or key in owners
        return ref(item) in known or (owned and self._bytes[key] < MAX_OWNED_BYTES)

    def pass_over(self, item: Object) -> None:
        """Note that ``item`` is not stored, so that a later list does not call it missed.

        Otherwise, objects created before their owner would make a good watch look stale.
        """
        key = key_of(item)
        if key is not None and len(self._passed_over[1]) < MAX_PASSED_OVER:
            self._passed_over[1].add(key)

    def knows(self, item: Object) -> bool:
        """Whether just this version of ``item`` is known."""
        key = key_of(item)
        kept = self._objects.get(key, {}).get(ref(item)) if key is not None else None
        return kept is not None and kept.is_of(item["metadata"])

    def put(self, item: Object) -> Key | None:
        """Store ``item`` unless a newer version is known; return its service."""
        key = key_of(item)
        if key is not None:
            self._put(key, ref(item), _Packed.of(item))
        return key

    def _put(self, key: Key, where: Ref, fresh: _Packed) -> None:
        known = self._objects.setdefault(key, {})
        before = known.get(where)
        if before is None or not fresh.older(before):
            known[where] = fresh
            self._bytes[key] += len(fresh.packed) - (len(before.packed) if before else 0)
            self.changes[where.kind] += 1

    def drop(self, item: Object) -> Key | None:
        """Forgets ``item``, unless another object has its name by now; returns its service."""
        key = key_of(item)
        if key is not None:
            self._drop(key, ref(item), item["metadata"].get("uid", ""))
        return key

    def _drop(self, key: Key, where: Ref, uid: str) -> None:
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
        """Begin a list: :meth:`replace` does not take back in what is deleted from now on."""
        self._gone = set()
        self._passed_over = (self._passed_over[1], set())

    def listed(self, items: Iterable[Object], owners: Container[Key] = ()) -> list[Listed]:
        """Pack some objects of a list for :meth:`replace`; known ones take no more room.

        ``owners`` were listed before.
        """
        found = []
        for item in items:
            key = key_of(item)
            if key is not None and self.expected(item, owners):
                where = ref(item)
                before = self._objects.get(key, {}).get(where)
                if before is None or not before.is_of(item["metadata"]):
                    before = _Packed.of(item)
                found.append(Listed(key, where, before))
            else:
                self.pass_over(item)
        return found

    def replace(self, kind: str, items: Iterable[Listed], version: str) -> int:
        """Store a list of all objects of ``kind``, which was current at ``version``.

        Returns how many of them were not known, or known in an older version. Objects that are
        newer than the list stay: watches go on while it is read.
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
                behind += before.older(fresh)
            self._put(key, where, fresh)
        for key in self.known():
            for where, kept in list(self._objects[key].items()):
                stale = where.kind == kind and (key, where) not in listed
                if stale and not kept.after(version):
                    self._drop(key, where, kept.uid)
                    behind += kept.uid not in present  # else its labels name another owner now
        return behind

    def get(self, key: Key, wanted: Ref) -> Object | None:
        """One object of a service."""
        kept = self._objects.get(key, {}).get(wanted)
        return kept.item if kept else None

    def of(self, key: Key, kinds: Container[str]) -> list[Object]:
        """Return a service's objects of some kinds."""
        known = self._objects.get(key, {}).items()
        return [kept.item for where, kept in known if where.kind in kinds]

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind, of all services."""
        return [
            kept.item
            for known in self._objects.values()
            for where, kept in known.items()
            if where.kind == kind
        ]

    def count(self, kind: str, namespace: str) -> int:
        """How many objects of a kind the services of a namespace have."""
        some = (known for key, known in self._objects.items() if key.namespace == namespace)
        return sum(where.kind == kind for known in some for where in known)

    def known(self) -> list[Key]:
        """All services, also those of which only leftovers are known."""
        return list(self._objects)

    def services(self) -> list[Key]:
        """Services whose InferenceService exists."""
        return [key for key, known in self._objects.items() if Ref(SERVICE.kind, key.name) in known]
