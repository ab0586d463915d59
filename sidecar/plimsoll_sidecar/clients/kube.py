"""Access the Kubernetes API from the supervisor, with limits on time and size.

The client reads the projected token for each request, because the kubelet renews the token.
"""

from __future__ import annotations

import math
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
from plimsoll_api.units import MAX_WHOLE_NUMBER_DIGITS, parse_whole_number
from plimsoll_sidecar.clients.http import (
    HttpResponse,
    RequestError,
    ResponseTooLargeError,
    create_pool,
    request,
)

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_TIMEOUT_S = 10.0
FIELD_MANAGER = "plimsoll-supervisor"
# If a page is too large, this number is divided by 4.
MAX_OBJECTS_PER_PAGE = 64
MAX_PAGES = 1000
# For all pages of a collection together.
LIST_TIMEOUT_S = 60.0
# The server may ask for more.
MAX_RETRY_AFTER_S = 600.0
# The server's error message may come from a webhook.
MAX_MESSAGE_CHARS = 500

Object = dict[str, Any]
T = TypeVar("T")


class KubeError(Exception):
    """A failed request to the API server. ``status`` is 0 without a usable response.

    ``retry_after_s`` is the pause that the server asks for (status 429 or 503).
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
    """The object does not exist, or the server does not know its kind."""


class ConflictError(KubeError):
    """The object already exists, or has changed since it was read."""


class TooManyRequestsError(KubeError):
    """The server asks its clients to send fewer requests."""


class TooLargeError(KubeError):
    """The response is larger than the limit."""


class UnexpectedResponseError(KubeError):
    """A successful response without the expected object, for example from a proxy."""


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
    """Client of one API server. Thread-safe."""

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
        self._server_time: tuple[float, float] | None = None
        """Unix time in the newest response, and the monotonic time of its arrival."""
        self._failed_at = -math.inf
        self._http = create_pool(
            maxsize=4,
            ssl_context=_create_tls_context(has_own_ca=ca_file is not None),
            ca_certs=str(ca_file) if ca_file else None,
            cert_file=str(cert_file) if cert_file else None,
            key_file=str(key_file) if key_file else None,
        )

    @classmethod
    def create_in_cluster(cls) -> KubeClient | None:
        """Return a client that uses this pod's service account; None outside a cluster."""
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
        """Return the server's time in Unix seconds; before the first response, this node's time."""
        # Pods on different nodes compare these times.
        if self._server_time is None:
            return time.time()
        server_time, read_at = self._server_time
        return server_time + time.monotonic() - read_at

    def compute_seconds_since_outage(self) -> float:
        """Return the seconds since the server last did not answer or returned a server error."""
        return time.monotonic() - self._failed_at

    def get(self, path: str) -> Object:
        """Return the object at ``path``. Raises KubeError."""
        return _decode_object("GET", path, self._call("GET", path))

    def list_items(self, path: str, item_type: type[T], **query: str) -> Iterator[T]:
        """Yield the objects of a collection, page by page. Raises KubeError."""
        limit, continue_token, deadline = (
            MAX_OBJECTS_PER_PAGE,
            "",
            time.monotonic() + LIST_TIMEOUT_S,
        )
        for _ in range(MAX_PAGES):
            if time.monotonic() > deadline:
                raise KubeError(
                    0,
                    f"GET {path} failed: reading all pages took longer than {LIST_TIMEOUT_S:.0f} s",
                )
            page_query = (
                query
                | {"limit": str(limit)}
                | ({"continue": continue_token} if continue_token else {})
            )
            try:
                answer = self._call("GET", path, query=page_query)
                page: _Page[T] = decode(answer.body, _Page[item_type])  # type: ignore[valid-type]
            except MalformedError as error:
                raise UnexpectedResponseError(
                    0,
                    f"GET {path} failed: the response is not a list of Kubernetes objects: {error}",
                ) from error
            except TooLargeError:
                if limit == 1:
                    raise
                limit //= 4
                continue
            yield from page.items or ()
            continue_token = page.metadata.next or ""
            if not continue_token:
                return
        raise KubeError(
            0, f"GET {path} failed: the list has more than {MAX_PAGES} pages of {limit} objects"
        )

    def put(self, path: str, body: Object) -> Object:
        """Replace an object, and return the stored object.

        Raises ConflictError if ``resourceVersion`` in ``body`` is outdated, and KubeError.
        """
        return _decode_object("PUT", path, self._call("PUT", path, body))

    def create(self, path: str, body: Object) -> Object:
        """Create an object in the collection at ``path``, and return it. Raises KubeError."""
        return _decode_object("POST", path, self._call("POST", path, body))

    def apply(self, path: str, body: Object) -> Object:
        """Apply ``body`` server-side, and return the stored object. Raises KubeError."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        content_type = "application/apply-patch+yaml"
        return _decode_object("PATCH", path, self._call("PATCH", path, body, query, content_type))

    def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> HttpResponse:
        # Raises KubeError for a status from 300 on.
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except (OSError, UnicodeError) as error:
                message = f"failed to read the service account token {self._token_file}: {error}"
                raise KubeError(0, message) from error
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), content_type
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = request(self._http, method, url, REQUEST_TIMEOUT_S, data, headers)
        except RequestError as error:
            error_class = TooLargeError if isinstance(error, ResponseTooLargeError) else KubeError
            if error_class is KubeError:
                self._failed_at = time.monotonic()
            raise error_class(0, f"{method} {path} failed: {error}") from error
        date = _read_response_time(answer)
        if date is not None:
            self._server_time = date, time.monotonic()
        if answer.status < 300:
            return answer
        if answer.status >= 500:
            self._failed_at = time.monotonic()
        message = f"{method} {path} failed: {_read_error_message(answer)}"
        error_class_of_status = _ERROR_BY_STATUS.get(answer.status, KubeError)
        raise error_class_of_status(answer.status, message, _read_retry_after_s(answer))


def _create_tls_context(has_own_ca: bool) -> ssl.SSLContext:
    # Python 3.13 requires key identifiers by default, which the CAs of many clusters lack, such as
    # those of EKS. The system's CAs are loaded unless the pool will add the cluster's own CA.
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not has_own_ca:
        context.load_default_certs()
    return context


def _decode_object(method: str, path: str, answer: HttpResponse) -> Object:
    try:
        decoded = decode(answer.body, Object)
    except MalformedError as error:
        raise UnexpectedResponseError(
            0, f"{method} {path} failed: the response is not a Kubernetes object: {error}"
        ) from error
    if not isinstance(decoded.get("metadata"), dict):
        raise UnexpectedResponseError(
            0,
            f"{method} {path} failed: the response is not a Kubernetes object, because it "
            "has no metadata",
        )
    return decoded


class _Status(msgspec.Struct):
    message: str | None = None


def _read_error_message(answer: HttpResponse) -> str:
    try:
        message = decode(answer.body, _Status).message
    except MalformedError:
        message = None
    return message[:MAX_MESSAGE_CHARS] if message else f"HTTP {answer.status}"


def _read_response_time(answer: HttpResponse) -> float | None:
    try:
        return parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _read_retry_after_s(answer: HttpResponse) -> float | None:
    seconds = parse_whole_number(answer.headers.get("Retry-After", "")[:MAX_WHOLE_NUMBER_DIGITS])
    return None if seconds is None else min(float(seconds), MAX_RETRY_AFTER_S)


SERVICE_NAME_LABEL = "kubernetes.io/service-name"
# For all Services together. An endpoint takes about 200 bytes of memory.
MAX_ENDPOINTS = 10_000


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
    """Reads the EndpointSlices of one namespace. All methods raise KubeError."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def compute_seconds_since_outage(self) -> float:
        """Return the seconds since the server last did not answer or returned a server error."""
        return self._kube.compute_seconds_since_outage()

    def iterate_endpoints(self, services: Iterable[str]) -> Iterator[Endpoint]:
        """Yield all endpoints of the named ``services``."""
        names = ",".join(sorted(services))
        count = 0
        if not names:
            return
        for endpoint_slice in self._iterate_slices(
            labelSelector=f"{SERVICE_NAME_LABEL} in ({names})"
        ):
            for endpoint in endpoint_slice.endpoints or ():
                count += 1
                if count > MAX_ENDPOINTS:
                    raise KubeError(
                        0, f"the Services {names} have more than {MAX_ENDPOINTS} endpoints"
                    )
                yield _make_endpoint(endpoint_slice.service, endpoint)

    def find_services(self, pod: str) -> set[str]:
        """Return the names of all Services of the namespace that route to ``pod``."""
        return {
            endpoint_slice.service
            for endpoint_slice in self._iterate_slices()
            if any(
                endpoint.target is not None and endpoint.target.name == pod
                for endpoint in endpoint_slice.endpoints or ()
            )
        } - {""}

    def find_ready_addresses(self, pods: Collection[str]) -> dict[str, str]:
        """Return the addresses of the ``pods`` that are ready in any Service, by pod name."""
        return {
            converted.pod: converted.address
            for endpoint_slice in self._iterate_slices()
            for endpoint in endpoint_slice.endpoints or ()
            if (converted := _make_endpoint(endpoint_slice.service, endpoint)).pod in pods
            and converted.ready
        }

    def _iterate_slices(self, **query: str) -> Iterator[_Slice]:
        return self._kube.list_items(self._path, _Slice, **query)


def _make_endpoint(service: str, endpoint: _Endpoint) -> Endpoint:
    # An absent condition counts as true, as in the API. A Service with publishNotReadyAddresses
    # reports all its pods as ready; serving then shows whether the pod itself is ready.
    conditions = endpoint.conditions or _Conditions()
    return Endpoint(
        service=service,
        pod=endpoint.target.name if endpoint.target is not None else "",
        ready=conditions.ready is not False and conditions.serving is not False,
        address=next(iter(endpoint.addresses), ""),
    )
