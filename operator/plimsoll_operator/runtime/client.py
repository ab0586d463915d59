"""Client of the Kubernetes API server. Objects are plain dictionaries."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from plimsoll_api.units import MAX_WHOLE_NUMBER_DIGITS, parse_whole_number
from plimsoll_operator.kinds import EVENT, POD, Kind, Object
from plimsoll_operator.render.names import FIELD_MANAGER, OWNED_FIELDS_KEY, compute_digest
from plimsoll_operator.runtime.queue import RateLimit

log = logging.getLogger(__name__)

OBJECT_MEDIA_TYPE = "application/json"
METADATA_MEDIA_TYPE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST_MEDIA_TYPE = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
MAX_WATCH_SILENCE_S = 120.0
"""Time without an event after which a watch counts as broken."""
WATCH_SHARE = 0.75
"""Share of :data:`MAX_WATCH_SILENCE_S` after which the API server ends a watch. It promises no
bookmarks: it sends none for Events, and none while no object of the kind changes."""
MAX_EVENT_BYTES = 4 << 20
"""Maximum size of a watch event: an object's metadata, with annotations of up to 256 KiB."""
METADATA_PAGE_OBJECTS = 50
"""Number of objects in a page of metadata, which may have 1.5 MiB each."""
KEPT_METADATA_FIELDS = ("name", "labels", "resourceVersion")
MAX_RESPONSE_BYTES = 32 << 20
"""Maximum size of a JSON response. Anyone may create objects of 1.5 MiB with Plimsoll's labels."""
MAX_EVENTS_PER_OBJECT = 50
IMPOSSIBLE_VERSION = "1"
"""Resource version that no object has: etcd's first revision belongs to the cluster itself."""

MAX_TRIES = 5
MAX_RETRY_AFTER_S = 10.0
"""Maximum wait after a throttled request (429), even if ``Retry-After`` is longer."""


class ApiError(Exception):
    """Raised for an error response of the API server; ``message`` is the server's text."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def is_lasting(self) -> bool:
        """Whether a retry of the same request cannot succeed."""
        malformed = self.message.startswith("failed to create typed patch object")
        return malformed or self.status in (400, 403, 404, 422)


def is_outage(error: Exception) -> bool:
    """Report whether ``error`` means that the API server cannot be reached or is starting."""
    if isinstance(error, ApiError):
        return error.status >= 500 and not error.is_lasting
    return isinstance(error, OSError) and not isinstance(error, TooLargeError)


class TooLargeError(OSError):
    """Raised for a response larger than :data:`MAX_RESPONSE_BYTES`."""


class ConflictError(ApiError):
    """Raised if the object has changed since it was read, or already exists."""


class Api:
    """Client of the API server with one connection pool.

    Every call may raise :class:`ApiError`, or OSError or TimeoutError if the server does not
    respond within ``timeout_s``. ``writes`` counts writes by verb and kind, and ``refusals``
    throttled requests. Writes must complete within the seconds that ``get_remaining_s`` returns.
    """

    def __init__(
        self, connection: Any, timeout_s: float, limit: RateLimit, max_tries: int = MAX_TRIES
    ) -> None:
        self._client, self._timeout_s, self.limit = connection, timeout_s, limit
        self._tries = max_tries
        self.get_remaining_s: Callable[[], float] = lambda: math.inf
        self.writes: Counter[tuple[str, str]] = Counter()
        self.requests = 0
        self.refusals = 0

    @classmethod
    async def connect(
        cls, kubeconfig: str | None, timeout_s: float, limit: RateLimit, max_tries: int = MAX_TRIES
    ) -> Api:
        """Connect with ``kubeconfig`` or else the pod's ServiceAccount or the default kubeconfig.

        Raises OSError if the kubeconfig is missing or defines no cluster.
        """
        settings = client.Configuration()
        # As in kubectl: Python 3.13 also requires key identifiers, which many clusters' CAs lack.
        settings.disable_strict_ssl_verification = True
        settings.connection_pool_maxsize = 0  # each watch keeps a connection
        try:
            if kubeconfig:
                raise config.ConfigException(
                    "the kubeconfig takes precedence over the ServiceAccount"
                )
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            try:
                await config.load_kube_config(
                    config_file=kubeconfig, client_configuration=settings, persist_config=False
                )
            except config.ConfigException as error:
                raise OSError(
                    f"failed to load kubeconfig {kubeconfig or '(default)'}: {error}"
                ) from None
        api = cls(client.ApiClient(settings), timeout_s, limit, max_tries)
        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(api._on_request_start)
        trace.on_connection_create_end.append(api._on_connected)
        trace.on_connection_reuseconn.append(api._on_connected)
        settings.trace_configs = [trace]
        return api

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def list_pages(
        self, kind: Kind, namespace: str | None, name: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """Yield pages of the operator's objects of a kind, with the list's resource version.

        With ``name``, list only this object, for accounts that may list but not get.
        """
        query = {"labelSelector": kind.selector} if kind.selector else {}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else _make_field_query(kind)
        limit = kind.page
        while True:
            try:
                wanted = query | {"limit": str(limit)}
                items, version, following = await self._read_page(kind.path(namespace), wanted)
            except TooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            limit = min(kind.page, 2 * limit)
            # The items of a list lack these two fields.
            type_meta = {"apiVersion": kind.api_version, "kind": kind.kind}
            yield [type_meta | item for item in items], version
            if not following:
                return
            query["continue"] = following

    async def list_metadata(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        """Return names, labels and versions of a namespace's objects, and the list's version."""
        query, first = {"limit": str(METADATA_PAGE_OBJECTS)} | _make_field_query(kind), ""
        items: list[Object] = []
        while True:
            page, version, following = await self._read_page(
                kind.path(namespace), query, METADATA_LIST_MEDIA_TYPE
            )
            first = first or version
            for meta in (one["metadata"] for one in page):
                items.append(
                    {"metadata": {key: meta[key] for key in KEPT_METADATA_FIELDS if key in meta}}
                )
            if not following:
                return items, first
            query["continue"] = following

    async def _read_page(
        self, path: str, query: dict[str, str], accept: str = OBJECT_MEDIA_TYPE
    ) -> tuple[list[Object], str, str]:
        """Return the objects of a page, the list's resource version, and the continue token.

        Raises OSError if the response is not a list, for example from a proxy.
        """
        page = await self._call("GET", path, query, accept=accept)
        try:
            meta = page["metadata"]
            items = [
                _replace_managed_fields_of(one) for one in page["items"] or ()
            ]  # null if there are none
            return items, meta["resourceVersion"], meta.get("continue") or ""
        except (KeyError, TypeError, AttributeError) as error:
            raise OSError(f"GET {path}: the response contains no list: {error!r}") from error

    async def watch(
        self, kind: Kind, namespace: str | None, version: str, accept: str = METADATA_MEDIA_TYPE
    ) -> AsyncIterator[tuple[str, Object]]:
        """Watch objects or their metadata until the API server ends the watch after some minutes.

        Yield the type of each event, including ``BOOKMARK``, and the event's object.
        """
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        lifetime_s = int(WATCH_SHARE * MAX_WATCH_SILENCE_S)
        query |= {"timeoutSeconds": str(lifetime_s)} | _make_field_query(kind)
        await self.limit.acquire()
        limits = aiohttp.ClientTimeout(
            total=lifetime_s + MAX_WATCH_SILENCE_S, sock_read=MAX_WATCH_SILENCE_S
        )
        subject = f"watch of {kind.plural}"
        path = kind.path(namespace)
        response = await self._open("GET", path, query, accept=accept, limits=limits)
        try:
            if response.status >= 400:
                raise _parse_error(response.status, await response.read())
            rest = b""
            async for chunk in response.response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise OSError(f"{subject}: the event is larger than {MAX_EVENT_BYTES} bytes")
                for line in lines:
                    event = json.loads(line)
                    item = event["object"]
                    if event["type"] == "ERROR":
                        raise _parse_error(item.get("code", 500), json.dumps(item).encode())
                    if not item["metadata"]["resourceVersion"]:
                        raise KeyError("resourceVersion")
                    yield event["type"], item
        except aiohttp.ClientError as error:
            raise OSError(f"{subject}: {str(error) or repr(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(
                f"{subject}: a line of the response is not a watch event: {error}"
            ) from error
        finally:
            response.response.close()

    async def serves(self, kind: Kind) -> bool:
        """Report whether the cluster currently serves this API."""
        try:
            resources = await self._call("GET", kind.group_path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in resources.get("resources") or ())

    async def list_object_events(self, namespace: str, uid: str) -> list[Object]:
        """Return at most :data:`MAX_EVENTS_PER_OBJECT` Warning Events about the object ``uid``."""
        of = f"involvedObject.uid={uid},type=Warning"
        return await self.list_first(EVENT, namespace, of, MAX_EVENTS_PER_OBJECT)

    async def list_first(
        self, kind: Kind, namespace: str | None, fields: str, limit: int
    ) -> list[Object]:
        """Return the first ``limit`` objects that the field selector ``fields`` selects."""
        query = {"limit": str(limit), "fieldSelector": fields}
        return (await self._read_page(kind.path(namespace), query))[0]

    async def probe(self, kind: Kind, namespace: str | None) -> None:
        """Read at most one object, to check whether the API server responds."""
        await self._call("GET", kind.path(namespace), {"limit": "1"})

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return an object; None if it does not exist."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, kind: Kind, item: Object) -> Object:
        """Create an object. Raises :class:`ConflictError` if the name is taken."""
        return await self._call("POST", kind.path(item["metadata"]["namespace"]), body=item)

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Replace an object. Raises :class:`ConflictError` if ``item`` is out of date."""
        meta = item["metadata"]
        path = kind.path(meta["namespace"], meta["name"])
        return await self._call("PUT", path, body=_make_server_object(item))

    async def evict(self, namespace: str, pod: str, uid: str) -> str:
        """Evict the pod. Return why the eviction must be retried; empty if the pod is evicted.

        A new pod with the same name but another UID is not evicted.
        """
        self.writes["evict", "Pod"] += 1
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._call(
                "POST", POD.path(namespace, pod, "eviction"), body=body, retries_throttled=False
            )
        except ApiError as error:
            # Also 403 from an admission webhook, and 500 for a pod with two PodDisruptionBudgets.
            return "" if error.status == 404 else str(error)
        return ""

    async def apply_new(self, kind: Kind, item: Object) -> Object:
        """Apply a new object. Raises :class:`ConflictError` if an object with this name exists."""
        meta = item["metadata"] | {"resourceVersion": IMPOSSIBLE_VERSION}
        return await self.apply(kind, item | {"metadata": meta})

    async def apply(
        self, kind: Kind, item: Object, subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """Apply ``item`` with server-side apply; ``manager`` then owns the fields in ``item``.

        Raises :class:`ConflictError` if the resource version of ``item`` is not current.
        """
        meta = item["metadata"]
        self.writes["apply", kind.kind] += 1
        return await self._call(
            "PATCH",
            kind.path(meta["namespace"], meta["name"], subresource),
            {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"},
            encode_yaml(_make_server_object(item)),
            # A parameter in the content type keeps the client from encoding the body.
            "application/apply-patch+yaml; charset=utf-8",
        )

    async def delete(self, kind: Kind, item: Object) -> bool:
        """Delete an object. Return False if the object has changed since ``item`` was read."""
        meta = item["metadata"]
        preconditions = {key: meta[key] for key in ("uid", "resourceVersion")}
        self.writes["delete", kind.kind] += 1
        try:
            await self._call(
                "DELETE",
                kind.path(meta["namespace"], meta["name"]),
                body={"preconditions": preconditions, "propagationPolicy": "Background"},
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return error.status == 404
        return True

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        retries_throttled: bool = True,
        accept: str = OBJECT_MEDIA_TYPE,
    ) -> Object:
        for remaining in reversed(range(self._tries if retries_throttled else 1)):
            await self.limit.acquire()
            if method != "GET":
                query = (query or {}) | self._make_timeout_parameter(method, path)
            self.requests += 1
            status, data, wait = await self._send(method, path, query, body, content_type, accept)
            if status != 429:
                break
            if retries_throttled:
                self.refusals += 1
            if remaining:
                await asyncio.sleep(wait)
        if status >= 400:
            raise _parse_error(status, data)
        try:
            decoded: Object = json.loads(data)
        except ValueError as error:  # for example a response of a proxy
            raise OSError(f"{method} {path}: the response is not JSON: {error}") from error
        if not isinstance(decoded, dict):
            raise OSError(f"{method} {path}: the response is not a JSON object")
        return (
            _replace_managed_fields_of(decoded)
            if isinstance(decoded.get("metadata"), dict)
            else decoded
        )

    # Raises OSError if another operator may lead now.
    def _make_timeout_parameter(self, method: str, path: str) -> dict[str, str]:
        left_s = self.get_remaining_s()
        if left_s <= 0.0:
            raise OSError(
                f"{method} {path}: the request was not sent, because another operator may be the"
                " leader now"
            )
        return {"timeout": f"{math.ceil(min(left_s, self._timeout_s))}s"}

    async def _on_request_start(
        self, _: Any, context: Any, params: aiohttp.TraceRequestStartParams
    ) -> None:
        context.method, context.path = params.method, params.url.path

    # Another operator may lead now, after a write waited for a connection.
    async def _on_connected(self, _: Any, context: Any, __: Any) -> None:
        if context.method != "GET":
            self._make_timeout_parameter(context.method, context.path)

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, body: Any, content_type: str,
        accept: str,
    ) -> tuple[int, bytes, float]:  # fmt: skip
        """Send a request; return the status, the body, and ``Retry-After`` in seconds."""
        response = await self._open(method, path, query, body, content_type, accept)
        data = bytearray()
        try:
            async for chunk in response.response.content.iter_any():
                data += chunk
                if len(data) > MAX_RESPONSE_BYTES:
                    response.response.close()
                    text = f"the response is larger than {MAX_RESPONSE_BYTES >> 20} MiB"
                    raise TooLargeError(f"{method} {path}: {text}")
        except aiohttp.ClientError as error:
            raise OSError(f"{method} {path}: {str(error) or repr(error)}") from error
        retry_after = str((response.headers or {}).get("Retry-After") or "1")
        seconds = parse_whole_number(retry_after[:MAX_WHOLE_NUMBER_DIGITS])
        wait = 1.0 if seconds is None else float(seconds)
        return response.status, bytes(data), min(wait, MAX_RETRY_AFTER_S)

    async def _open(
        self, method: str, path: str, query: dict[str, str] | None, body: Any = None,
        content_type: str = "application/json", accept: str = OBJECT_MEDIA_TYPE,
        limits: aiohttp.ClientTimeout | None = None,
    ) -> Any:  # fmt: skip
        headers = {"Accept": accept, "Content-Type": content_type}
        method, url, headers, body, _ = await self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        url += "?" + urlencode(query) if query else ""
        try:
            return await self._client.call_api(
                method, url, headers, body, _request_timeout=limits or self._timeout_s
            )
        except aiohttp.ClientError as error:
            raise OSError(f"{method} {path}: {str(error) or repr(error)}") from error


def replace_managed_fields(metadata: Object) -> Object:
    """Return ``metadata`` with a hash of Plimsoll's fields in place of ``managedFields``.

    A suffix of the hash shows that Plimsoll also owns a workload's replicas.
    """
    reduced = {name: value for name, value in metadata.items() if name != "managedFields"}
    for entry in metadata.get("managedFields") or ():
        applied = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if applied and not entry.get("subresource"):
            fields = dict(entry.get("fieldsV1") or {})
            spec = dict(fields.get("f:spec") or {})
            replicas = "+replicas" if spec.pop("f:replicas", None) is not None else ""
            reduced[OWNED_FIELDS_KEY] = compute_digest(fields | {"f:spec": spec}) + replicas
    return reduced


def _replace_managed_fields_of(item: Object) -> Object:
    item["metadata"] = replace_managed_fields(item["metadata"])
    return item


def _make_server_object(item: Object) -> Object:
    """Return ``item`` without the operator's additions."""
    meta = {name: value for name, value in item["metadata"].items() if name != OWNED_FIELDS_KEY}
    return item | {"metadata": meta}


def _make_field_query(kind: Kind) -> dict[str, str]:
    return {"fieldSelector": kind.fields} if kind.fields else {}


def encode_yaml(item: Object) -> bytes:
    """Return ``item`` as JSON that is also valid YAML, as which the API server parses an apply.

    Line breaks and characters that YAML calls not printable (1.2.2, section 5.1) are escaped.
    """
    text = json.dumps(item, ensure_ascii=False)
    return _NOT_PRINTABLE_PATTERN.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


_NOT_PRINTABLE_PATTERN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def _parse_error(status: int, data: bytes) -> ApiError:
    kind = ConflictError if status == 409 else ApiError
    try:
        body = json.loads(data)
        # Only the causes of a refused eviction name the PodDisruptionBudget.
        causes = (body.get("details") or {}).get("causes") if status == 429 else None
        texts = [body.get("message") or "", *(one["message"] for one in causes or ())]
        return kind(status, body.get("reason") or "Unknown", " ".join(texts))
    except (ValueError, AttributeError, KeyError, TypeError):
        return kind(status, "Unknown", data[:200].decode(errors="replace"))
