"""An API server in memory, below the operator's own client: for tests of controllers.

It has none of Kubernetes' controllers: a test plays those. One table of cases (``api_cases.py``) is
run against both, so that it answers like the real one.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from plimsoll_operator.kinds import (
    CLAIM,
    DEFINED_KINDS,
    EVENT,
    OWNED_KINDS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Kind,
    Object,
)
from plimsoll_operator.runtime.client import IMPOSSIBLE_VERSION, Api
from plimsoll_operator.runtime.queue import RateLimit
from tests.lab.definitions import Definitions
from tests.lab.objects import Refused

READ_KINDS = (POD, EVENT, CLAIM, RESOURCE_CLAIM, RESOURCE_SLICE)
KINDS = {kind.plural: kind for kind in (*DEFINED_KINDS, *OWNED_KINDS, *READ_KINDS)}
LIST_KEYS = ("name", "type", "uid", "port")
"""Fields that identify the entries of a list for server-side apply, if all entries have them."""
MADE_AT = "2026-01-01T00:00:00Z"


class Answer(Exception):
    """The server refuses: an HTTP status, a reason and a message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass
class _Kept:
    item: Object
    applied: dict[tuple[str, str], Object] = field(default_factory=dict)
    """What each manager named last, by manager and subresource."""


class FakeApi(Api):
    """The operator's client on a server of its own; ``definitions`` are the rules of our kinds.

    ``refuse`` may raise :class:`Answer` for a request (method, kind, name), as an admission policy
    or a quota does. The next ``busy`` requests are answered with 429. ``changed`` is called with
    each object that was written, and whether it is gone.
    """

    def __init__(self, definitions: Definitions | None = None, tries: int = 3) -> None:
        super().__init__(None, 1.0, RateLimit(1e6, 1_000_000), tries)
        self._definitions = definitions
        self._objects: dict[tuple[str, str, str], _Kept] = {}
        self._version = int(IMPOSSIBLE_VERSION)
        self._pages: dict[str, tuple[list[Object], str]] = {}
        self.lacking: set[str] = set()
        """Kinds whose API the cluster does not have."""
        self.busy = 0
        self.refuse: Callable[[str, str, str], None] = lambda *_: None
        self.changed: Callable[[Object, bool], object] = lambda *_: None

    async def close(self) -> None:
        """Nothing is open."""

    def all(self, kind: str = "") -> Iterator[Object]:
        """Every object, or those of a kind, as copies."""
        for (plural, _, _), kept in sorted(self._objects.items()):
            if kind in ("", KINDS[plural].kind):
                yield copy.deepcopy(kept.item)

    def found(self, kind: str, name: str) -> Object | None:
        """The object of that name, whatever its namespace."""
        return next((i for i in self.all(kind) if i["metadata"]["name"] == name), None)

    def put(self, item: Object, applied: tuple[tuple[str, str], Object] | None = None) -> Object:
        """Store ``item``, status and all, as the one that it belongs to would."""
        kind = next(k for k in KINDS.values() if k.kind == item["kind"])
        meta = item["metadata"]
        at = (kind.plural, meta.get("namespace", ""), meta["name"])
        before = self._objects.get(at)
        fresh = copy.deepcopy(item)
        old: Object = before.item["metadata"] if before else {"uid": str(uuid.uuid4())}
        fresh["metadata"] |= {"uid": old["uid"], "creationTimestamp": MADE_AT}
        kept = before or _Kept({})
        if applied is not None:
            kept.applied[applied[0]] = copy.deepcopy(applied[1])
        if "spec" in fresh:
            moved = before is not None and _without_status(before.item) != _without_status(fresh)
            fresh["metadata"]["generation"] = old.get("generation", 1) + moved
        fresh["metadata"]["resourceVersion"] = old.get("resourceVersion", "")
        if before is None or fresh != before.item:
            self._version += 1
            fresh["metadata"]["resourceVersion"] = str(self._version)
            kept.item = fresh
            self._objects[at] = kept
            self.changed(copy.deepcopy(fresh), False)
        return copy.deepcopy(fresh)

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, body: Any, content_type: str,
        accept: str,
    ) -> tuple[int, bytes, float]:  # fmt: skip
        if self.busy:
            self.busy -= 1
            return 429, _status(Answer(429, "TooManyRequests", "too many requests")), 0.0
        sent = json.loads(body) if isinstance(body, bytes) else copy.deepcopy(body)
        try:
            return 200, json.dumps(self._answer(method, path, query or {}, sent)).encode(), 0.0
        except Answer as refused:
            return refused.status, _status(refused), 0.0

    def _answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Object:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if not parts:
            return self._served(path)
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        plural, name, subresource = (*parts, "", "")[:3]
        kind = KINDS.get(plural)
        if kind is None or kind.kind in self.lacking:
            raise Answer(404, "NotFound", "the server could not find the requested resource")
        if method != "GET":
            self.refuse(method, kind.kind, name or body["metadata"]["name"])
        at = (plural, namespace, name)
        match method:
            case "GET" if name:
                return self._one(at).item
            case "GET":
                return self._list(kind, namespace, query)
            case "POST" if subresource == "eviction":
                self._delete(at, body["deleteOptions"]["preconditions"])
                return {"kind": "Status", "status": "Success"}
            case "POST":
                return self._create(kind, namespace, body)
            case "PUT":
                return self._replace(at, body)
            case "PATCH":
                return self._apply(at, body, query["fieldManager"], subresource)
            case "DELETE":
                return self._delete(at, body.get("preconditions") or {})
        raise Answer(405, "MethodNotAllowed", method)

    def _served(self, path: str) -> Object:
        there = [k for k in KINDS.values() if k.group_path == path and k.kind not in self.lacking]
        if not there:
            raise Answer(404, "NotFound", "the server could not find the requested resource")
        return {"resources": [{"name": kind.plural, "kind": kind.kind} for kind in there]}

    def _one(self, at: tuple[str, str, str]) -> _Kept:
        if at not in self._objects:
            kind = KINDS[at[0]]
            plural = f"{at[0]}.{kind.group}".rstrip(".")
            raise Answer(404, "NotFound", f'{plural} "{at[2]}" not found')
        return self._objects[at]

    def _list(self, kind: Kind, namespace: str, query: dict[str, str]) -> Object:
        token = query.get("continue")
        if token:
            items, version = self._pages.pop(token)
        else:
            version = str(self._version)
            items = [
                one for one in self.all(kind.kind)
                if (not namespace or one["metadata"].get("namespace") == namespace)
                and _selected(one["metadata"].get("labels") or {}, query.get("labelSelector", ""))
                and _fields(one, query.get("fieldSelector", ""))
            ]  # fmt: skip
        limit = int(query.get("limit") or len(items) or 1)
        page, rest = items[:limit], items[limit:]
        meta = {"resourceVersion": version}
        if rest:
            meta["continue"] = uuid.uuid4().hex
            self._pages[meta["continue"]] = (rest, version)
        version_of = f"{kind.group}/{kind.version}".lstrip("/")
        # Items of a list lack these two.
        bare = [{k: v for k, v in i.items() if k not in ("apiVersion", "kind")} for i in page]
        return {
            "apiVersion": version_of, "kind": f"{kind.kind}List", "metadata": meta, "items": bare,
        }  # fmt: skip

    def _create(self, kind: Kind, namespace: str, body: Object) -> Object:
        at = (kind.plural, namespace, body["metadata"]["name"])
        if at in self._objects:
            raise Answer(409, "AlreadyExists", f'{kind.plural} "{at[2]}" already exists')
        body["metadata"].pop("resourceVersion", None)
        return self.put(self._judged(body, None, False))

    def _replace(self, at: tuple[str, str, str], body: Object) -> Object:
        before = self._one(at).item
        self._current(before, body["metadata"].get("resourceVersion"))
        if self._definitions and KINDS[at[0]] in DEFINED_KINDS and "status" in before:
            body["status"] = before["status"]
        return self.put(self._judged(body, before, False))

    def _apply(
        self, at: tuple[str, str, str], body: Object, manager: str, subresource: str
    ) -> Object:
        kept = self._objects.get(at)
        version = body["metadata"].pop("resourceVersion", None)
        if kept is not None:
            self._current(kept.item, version)
        elif subresource:
            self._one(at)
        if not subresource:
            body.pop("status", None)
        else:
            body = {key: value for key, value in body.items() if key != "spec"}
        before = copy.deepcopy(kept.item) if kept else {}
        key = (manager, subresource)
        others = [v for k, v in kept.applied.items() if k != key] if kept else []
        made = _merged(
            _dropped(before, kept.applied.get(key, {}) if kept else {}, body, others), body
        )
        made["metadata"].setdefault("namespace", at[1])
        judged = self._judged(made, before or None, bool(subresource))
        return self.put(judged, (key, body))

    def _judged(self, item: Object, before: Object | None, of_status: bool) -> Object:
        """As admitted: refused, or with defaults, where it is of one of our kinds."""
        if self._definitions is None or item["kind"] not in {kind.kind for kind in DEFINED_KINDS}:
            return item
        try:
            if before is None:
                return self._definitions.create(item)
            return self._definitions.update(before, item, of_status)
        except Refused as refused:
            name = item["metadata"]["name"]
            unknown = str(refused).startswith("unknown field")
            status, reason = (400, "BadRequest") if unknown else (422, "Invalid")
            message = f'{item["kind"]} "{name}" is invalid: {refused}'
            raise Answer(status, reason, message) from None

    def _current(self, item: Object, version: str | None) -> None:
        if version and version != item["metadata"]["resourceVersion"]:
            message = (
                "the object has been modified; please apply your changes to the latest version"
            )
            raise Answer(409, "Conflict", message)

    def _delete(self, at: tuple[str, str, str], seen: dict[str, str]) -> Object:
        item = self._one(at).item
        if any(item["metadata"].get(key) != value for key, value in seen.items()):
            raise Answer(409, "Conflict", "the precondition of the deletion does not hold")
        if item["metadata"].get("finalizers"):
            self.put(item | {"metadata": item["metadata"] | {"deletionTimestamp": MADE_AT}})
        else:
            self._remove(at)
        return {"kind": "Status", "status": "Success"}

    def _remove(self, at: tuple[str, str, str]) -> None:
        self._one(at)
        item = self._objects.pop(at).item
        self._version += 1
        self.changed(copy.deepcopy(item), True)
        for other, kept in list(self._objects.items()):
            owners = kept.item["metadata"].get("ownerReferences") or ()
            if other in self._objects and any(o["uid"] == item["metadata"]["uid"] for o in owners):
                self._remove(other)


def _without_status(item: Object) -> Object:
    return {key: value for key, value in item.items() if key not in ("status", "metadata")}


def _status(refused: Answer) -> bytes:
    body = {
        "kind": "Status", "status": "Failure", "code": refused.status,
        "reason": refused.reason, "message": str(refused),
    }  # fmt: skip
    return json.dumps(body).encode()


def _selected(labels: dict[str, str], selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        key, equals, value = part.partition("=")
        if (key not in labels) if not equals else (labels.get(key) != value):
            return False
    return True


def _fields(item: Object, selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        path, _, value = part.partition("=")
        found: Any = item
        for step in path.split("."):
            found = (found or {}).get(step)
        if found != value:
            return False
    return True


def _key(entries: list[Any]) -> str | None:
    """The field that identifies the entries of an associative list; None for an atomic list."""
    if not entries or not all(isinstance(one, dict) for one in entries):
        return None
    return next((key for key in LIST_KEYS if all(key in one for one in entries)), None)


def _merged(old: Any, new: Any) -> Any:
    """``old`` with all that ``new`` names."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and (key := _key([*old, *new])):
        wanted = {one[key]: one for one in new}
        kept = [_merged(one, wanted.pop(one[key], one)) for one in old]
        return kept + [one for one in new if one[key] in wanted]
    return copy.deepcopy(new)


def _dropped(old: Any, before: Any, now: Any, others: list[Any]) -> Any:
    """``old`` without what a manager named ``before`` and no longer does, and no other names."""
    if isinstance(old, dict) and isinstance(before, dict):
        made = {}
        for key, value in old.items():
            theirs = [one[key] for one in others if isinstance(one, dict) and key in one]
            named = isinstance(now, dict) and key in now
            if key in before:
                rest = _dropped(value, before[key], now[key] if named else None, theirs)
                inside = isinstance(value, dict | list) and rest
                if named or theirs or (inside and rest != value):
                    made[key] = rest
            else:
                made[key] = value
        return made
    if isinstance(old, list) and isinstance(before, list) and (name := _key([*old, *before])):
        mine, wanted = _by(before, name), _by(now, name)
        theirs = [_by(one, name) for one in others]
        kept = []
        for one in old:
            held = [t[one[name]] for t in theirs if one[name] in t]
            if one[name] in mine and one[name] not in wanted and not held:
                continue
            both = one[name] in mine and one[name] in wanted
            kept.append(_dropped(one, mine[one[name]], wanted[one[name]], held) if both else one)
        return kept
    return old


def _by(entries: Any, name: str) -> dict[Any, Any]:
    return {one[name]: one for one in entries or () if isinstance(one, dict) and name in one}
