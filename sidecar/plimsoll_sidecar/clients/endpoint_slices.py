"""The endpoints of Services, from their EndpointSlices: read here only, page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from plimsoll_sidecar.clients.kube import KubeClient, KubeError

SERVICE_NAME = "kubernetes.io/service-name"
MAX_ENDPOINTS = 10_000
"""Endpoints of all requested Services; each takes some 200 bytes of memory."""


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
        return (self.metadata.labels or {}).get(SERVICE_NAME, "")


class Endpoint(msgspec.Struct, frozen=True):
    """A pod behind a Service; ``pod`` is empty if the endpoint is not a pod."""

    service: str
    pod: str
    ready: bool
    address: str


class EndpointSlices:
    """The EndpointSlices of one namespace. All methods raise KubeError."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def of(self, services: Iterable[str]) -> Iterator[Endpoint]:
        """Return the endpoints of the Services with these names."""
        names = ",".join(sorted(services))
        count = 0
        if not names:
            return
        for piece in self._read(labelSelector=f"{SERVICE_NAME} in ({names})"):
            for one in piece.endpoints or ():
                count += 1
                if count > MAX_ENDPOINTS:
                    raise KubeError(0, f"Services {names}: more than {MAX_ENDPOINTS} endpoints")
                yield _endpoint(piece.service, one)

    def services_of(self, pod: str) -> set[str]:
        """Return the names of the Services that route to ``pod``: reads the whole namespace."""
        return {
            piece.service
            for piece in self._read()
            if any(
                one.target is not None and one.target.name == pod for one in piece.endpoints or ()
            )
        } - {""}

    def _read(self, **query: str) -> Iterator[_Slice]:
        return self._kube.items(self._path, _Slice, **query)


def _endpoint(service: str, one: _Endpoint) -> Endpoint:
    """Take an absent condition for true, as the API does.

    A Service with ``publishNotReadyAddresses`` calls every pod ready: the pod's own readiness is
    the condition ``serving``.
    """
    conditions = one.conditions or _Conditions()
    return Endpoint(
        service=service,
        pod=one.target.name if one.target is not None else "",
        ready=conditions.ready is not False and conditions.serving is not False,
        address=next(iter(one.addresses), ""),
    )
