"""The ``/state`` pages of the other pods of a multi-node group.

The group's headless Service lists its pods. Whatever runs in them can write such a page, so what is
read of it is bounded.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from plimsoll_api.decoding import Malformed
from plimsoll_api.names import METRICS_PORT
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.clients.kube import KubeClient, Object

log = logging.getLogger(__name__)
State = TypeVar("State")

SERVICE_NAME = "kubernetes.io/service-name"
ANSWER_S = 3.0
MAX_PODS = 64
MAX_STATE_BYTES = 1 << 20
MAX_TEXT = 200


class GroupPages:
    """The pods that the Service ``subdomain`` lists and whose names ``wanted`` accepts."""

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        subdomain: str,
        wanted: Callable[[str], bool],
        port: int = METRICS_PORT,
    ) -> None:
        self._kube, self._wanted, self._port = kube, wanted, port
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_NAME}={subdomain}"
        self._trouble: dict[str, str] = {}

    def pods(self) -> dict[str, str]:
        """Name and address of each, at most :data:`MAX_PODS`; KubeError where nobody can say."""
        slices = self._kube.get(self._path, labelSelector=self._selector).get("items") or []
        found: dict[str, str] = {}
        for name, address in _endpoints(slices):
            if len(found) < MAX_PODS and self._wanted(name) and _is_address(address):
                found.setdefault(name, address)
        return found

    def page(self, pod: str, address: str, read: Callable[[bytes], State]) -> State | None:
        """Return what ``read`` makes of the page of ``pod``.

        None, and a line in the log, where there is no page or ``read`` raises Malformed.
        """
        host = f"[{address}]" if ":" in address else address
        try:
            status, body = HttpClient(f"http://{host}:{self._port}").call("GET", "/state", ANSWER_S)
            if status != 200 or len(body) > MAX_STATE_BYTES:
                raise EngineError(f"HTTP {status}, {len(body)} bytes")
            found = read(body)
        except (EngineError, Malformed) as error:
            self.note(pod, str(error))
            return None
        self.note(pod, "")
        return found

    def note(self, what: str, trouble: str) -> None:
        """Log trouble once, and its end."""
        before = self._trouble.get(what, "")
        self._trouble[what] = trouble
        if trouble and not before:
            log.warning("%s of the group cannot be read: %s", what, trouble[:MAX_TEXT])
        elif before and not trouble:
            log.info("%s of the group can be read again", what)


def _endpoints(slices: list[Object]) -> Iterator[tuple[str, str]]:
    for piece in slices:
        for endpoint in piece.get("endpoints") or []:
            name = str((endpoint.get("targetRef") or {}).get("name", ""))
            yield name, next(iter(endpoint.get("addresses") or ()), "")


def _is_address(text: object) -> bool:
    try:
        ipaddress.ip_address(str(text))
    except ValueError:
        return False
    return True
