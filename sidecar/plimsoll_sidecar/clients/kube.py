"""Access the Kubernetes API from the supervisor, with limits on time and size.

The client reads single objects, and EndpointSlices page by page.

It reads the projected token for each request, because the kubelet renews the token.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Collection, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import msgspec
from urllib3.util.ssl_ import create_urllib3_context

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.units import MAX_DIGITS, parse_whole_number
from plimsoll_sidecar.clients.http import Answer, RequestError, TooLongError, create_pool, request

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of the pod's service account."""
TIMEOUT_S = 10.0
"""Timeout in seconds of one request."""
FIELD_MANAGER = "plimsoll-supervisor"
PAGE_OBJECTS = 64
"""Number of objects in one page; halved until a page fits into one answer."""
MAX_PAGES = 1000
LIST_TIMEOUT_S = 60.0
"""Timeout in seconds for all pages of a collection."""
MAX_RETRY_AFTER_S = 600.0
"""Longest pause in seconds that a server may request."""
MAX_MESSAGE_CHARS = 500
"""Maximum number of characters of the server's message, which may come from a webhook."""

Object = dict[str, Any]
T = TypeVar("T")


class KubeError(Exception):
    """A request to the API server failed. ``status`` is 0 if there was no usable answer.

    ``retry_after_s`` is the pause in seconds that the server requests (429 and 503).
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 408, 429) or self.status >= 500


class ForbiddenError(KubeError):
    """The service account lacks the permission, or an admission policy denied the object."""


class NotFoundError(KubeError):
    """There is no such object, or its kind is not installed."""


class ConflictError(KubeError):
    """The object already exists, or has changed since it was read."""


class TooManyRequestsError(KubeError):
    """The server asks clients to wait."""


class TooLargeError(KubeError):
    """The answer is larger than the limit."""


class UnexpectedAnswerError(KubeError):
    """The server reported success without an object: a proxy may have answered for it."""


_ERROR_BY_STATUS = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: TooManyRequestsError,
}


class _ListMeta(msgspec.Struct):
    next: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct, Generic[T]):
    metadata: _ListMeta
    items: list[T] | None = None


class KubeClient:
    """Client of one API server. Thread-safe.

    Outside a cluster, it can use a client certificate.
    """

    def __init__(
        self,
        server: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
    ) -> None:
        self._server = server.rstrip("/")
        self._token_file = token_file
        self._answered: tuple[float, float] | None = None
        """The server's time in its newest answer, and the monotonic time of that answer."""
        self._http = create_pool(
            maxsize=4,
            ssl_context=_create_tls_context(own_ca=ca_file is not None),
            ca_certs=str(ca_file) if ca_file else None,
            cert_file=str(cert_file) if cert_file else None,
            key_file=str(key_file) if key_file else None,
        )

    @classmethod
    def in_cluster(cls) -> KubeClient | None:
        """Return a client with this pod's service account; None outside a cluster."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            return None
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        return cls(
            f"https://{host}:{port}",
            SERVICE_ACCOUNT_FOLDER / "token",
            SERVICE_ACCOUNT_FOLDER / "ca.crt",
        )

    def estimate_server_time(self) -> float:
        """Return the server's time in Unix seconds, or this node's time before the first answer.

        Pods on different nodes compare such times, which must therefore come from one clock.
        """
        if self._answered is None:
            return time.time()
        then, at = self._answered
        return then + time.monotonic() - at

    def get(self, path: str) -> Object:
        """Return the object at ``path``. Raises KubeError."""
        return _decode_object("GET", path, self._call("GET", path))

    def list_items(self, path: str, kind: type[T], **query: str) -> Iterator[T]:
        """Yield the objects of the collection at ``path`` as ``kind``, page by page.

        Raises KubeError, for example after :data:`MAX_PAGES` pages or :data:`LIST_TIMEOUT_S`.
        """
        limit, following, deadline = PAGE_OBJECTS, "", time.monotonic() + LIST_TIMEOUT_S
        for _ in range(MAX_PAGES):
            if time.monotonic() > deadline:
                raise KubeError(
                    0, f"GET {path}: not all pages were read within {LIST_TIMEOUT_S:.0f} s"
                )
            asked = query | {"limit": str(limit)} | ({"continue": following} if following else {})
            try:
                answer = self._call("GET", path, query=asked)
                found: _Page[T] = decode(answer.body, _Page[kind])  # type: ignore[valid-type]
            except MalformedError as error:
                raise UnexpectedAnswerError(
                    0, f"GET {path}: the answer is not a list: {error}"
                ) from error
            except TooLargeError:
                if limit == 1:
                    raise
                limit //= 4
                continue
            yield from found.items or ()
            following = found.metadata.next or ""
            if not following:
                return
        raise KubeError(
            0, f"GET {path}: the list has more than {MAX_PAGES} pages of {limit} objects"
        )

    def put(self, path: str, body: Object) -> Object:
        """Replace an object. Raises ConflictError if its ``resourceVersion`` is not the newest."""
        return _decode_object("PUT", path, self._call("PUT", path, body))

    def create(self, path: str, body: Object) -> Object:
        """Create ``body`` in the collection ``path``; return the stored object.

        Raises KubeError.
        """
        return _decode_object("POST", path, self._call("POST", path, body))

    def apply(self, path: str, body: Object) -> Object:
        """Apply ``body`` server-side, with the supervisor's field manager. Raises KubeError."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        content = "application/apply-patch+yaml"
        return _decode_object("PATCH", path, self._call("PATCH", path, body, query, content))

    def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        content: str = "application/json",
    ) -> Answer:
        """Send a request and return the answer. Raises KubeError unless it succeeded."""
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except (OSError, UnicodeError) as error:
                message = f"cannot read the service account token {self._token_file}: {error}"
                raise KubeError(0, message) from error
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), content
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = request(self._http, method, url, TIMEOUT_S, data, headers)
        except RequestError as error:
            failed = TooLargeError if isinstance(error, TooLongError) else KubeError
            raise failed(0, f"{method} {path}: {error}") from error
        date = _read_answer_time(answer)
        if date is not None:
            self._answered = date, time.monotonic()
        if answer.status < 300:
            return answer
        message = f"{method} {path}: {_read_error_message(answer)}"
        kind = _ERROR_BY_STATUS.get(answer.status, KubeError)
        raise kind(answer.status, message, _read_retry_after_s(answer))


def _create_tls_context(own_ca: bool) -> ssl.SSLContext:
    """Return a TLS context that verifies certificates as kubectl does.

    Python 3.13 also requires key identifiers, which the CAs of many clusters lack, for example EKS.
    The pool adds the CA of the cluster.
    """
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not own_ca:
        context.load_default_certs()
    return context


def _decode_object(method: str, path: str, answer: Answer) -> Object:
    try:
        found = decode(answer.body, Object)
    except MalformedError as error:
        raise UnexpectedAnswerError(
            0, f"{method} {path}: the answer is not an object: {error}"
        ) from error
    if not isinstance(found.get("metadata"), dict):
        raise UnexpectedAnswerError(
            0, f"{method} {path}: the answer is not an object: it has no metadata"
        )
    return found


class _Status(msgspec.Struct):
    message: str | None = None


def _read_error_message(answer: Answer) -> str:
    try:
        message = decode(answer.body, _Status).message
    except MalformedError:
        message = None
    return message[:MAX_MESSAGE_CHARS] if message else f"HTTP {answer.status}"


def _read_answer_time(answer: Answer) -> float | None:
    """Return the time of the answer in Unix seconds; None if the answer has no date."""
    try:
        return parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _read_retry_after_s(answer: Answer) -> float | None:
    """Return the seconds of the Retry-After header; None if it is missing or a date."""
    seconds = parse_whole_number(answer.headers.get("Retry-After", "")[:MAX_DIGITS])
    return None if seconds is None else min(float(seconds), MAX_RETRY_AFTER_S)


SERVICE_NAME_LABEL = "kubernetes.io/service-name"
MAX_ENDPOINTS = 10_000
"""Maximum number of endpoints of all Services; each takes about 200 bytes of memory."""


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions | None = None
    target: _Target | None = msgspec.field(default=None, name="targetRef")


class _Metadata(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Slice(msgspec.Struct):
    metadata: _Metadata
    endpoints: list[_Endpoint] | None = None

    @property
    def service(self) -> str:
        return (self.metadata.labels or {}).get(SERVICE_NAME_LABEL, "")


class Endpoint(msgspec.Struct, frozen=True):
    """Endpoint of a Service; ``pod`` is empty if the endpoint is not a pod."""

    service: str
    pod: str
    ready: bool
    address: str


class EndpointSlices:
    """EndpointSlices of one namespace. All methods raise KubeError."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def iterate_endpoints(self, services: Iterable[str]) -> Iterator[Endpoint]:
        """Yield the endpoints of the Services with these names."""
        names = ",".join(sorted(services))
        count = 0
        if not names:
            return
        for piece in self._iterate_slices(labelSelector=f"{SERVICE_NAME_LABEL} in ({names})"):
            for one in piece.endpoints or ():
                count += 1
                if count > MAX_ENDPOINTS:
                    raise KubeError(0, f"Services {names} have more than {MAX_ENDPOINTS} endpoints")
                yield _make_endpoint(piece.service, one)

    def find_services(self, pod: str) -> set[str]:
        """Return the names of the Services that route to ``pod``, from the whole namespace."""
        return {
            piece.service
            for piece in self._iterate_slices()
            if any(
                one.target is not None and one.target.name == pod for one in piece.endpoints or ()
            )
        } - {""}

    def find_ready_addresses(self, pods: Collection[str]) -> dict[str, str]:
        """Return the address of each of ``pods`` that is ready in some Service, by name."""
        return {
            found.pod: found.address
            for piece in self._iterate_slices()
            for one in piece.endpoints or ()
            if (found := _make_endpoint(piece.service, one)).pod in pods and found.ready
        }

    def _iterate_slices(self, **query: str) -> Iterator[_Slice]:
        return self._kube.list_items(self._path, _Slice, **query)


def _make_endpoint(service: str, endpoint: _Endpoint) -> Endpoint:
    """Convert an endpoint of an EndpointSlice. An absent condition counts as true, as in the API.

    A Service with ``publishNotReadyAddresses`` reports all pods as ready; the condition ``serving``
    then shows whether the pod itself is ready.
    """
    conditions = endpoint.conditions or _Conditions()
    return Endpoint(
        service=service,
        pod=endpoint.target.name if endpoint.target is not None else "",
        ready=conditions.ready is not False and conditions.serving is not False,
        address=next(iter(endpoint.addresses), ""),
    )
