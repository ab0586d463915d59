"""A service under KEDA, scaled by a number that a test sets."""

from __future__ import annotations

import json
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

import yaml

from tests.http_server import Handler
from tests.lab.images import ROOT
from tests.lab.keda import HOST
from tests.lab.kube import conditions

COOLDOWN_S = 15
POLL_S = 1
HPA_S = 60.0
"""Seconds for a few of the 15 s periods of Kubernetes' HorizontalPodAutoscaler controller."""


class Gauge:
    """A server that answers every request with ``value``; with an error while that is None."""

    def __init__(self) -> None:
        self.value: int | None = 0
        gauge = self

        class Page(Handler):
            def do_GET(self) -> None:
                body = json.dumps({"waiting": gauge.value}).encode()
                self.answer(500 if gauge.value is None else 200, body)

        self._server = ThreadingHTTPServer((HOST, 0), Page)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def trigger(self) -> dict[str, Any]:
        url = f"http://{HOST}:{self._server.server_port}/"
        metadata = {"url": url, "valueLocation": "waiting", "targetValue": "5"}
        return {"type": "metrics-api", "metadata": metadata}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Scaled:
    """The service of a test, its ScaledObject and its replicas."""

    def __init__(
        self, kubectl: Any, manifest: dict[str, Any], workload: tuple[str, str], trigger: Any
    ) -> None:
        self._kubectl, self.manifest, self._workload = kubectl, manifest, workload
        manifest["spec"]["autoscaling"] = _example() | {
            "cooldown": f"{COOLDOWN_S}s",
            "triggers": [trigger],
        }

    @property
    def _name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def object(self) -> Any:
        return self._kubectl.get("scaledobject", self._name)

    def says(self, type_: str) -> str:
        """Status and reason of a condition of KEDA's."""
        (found,) = [one for one in conditions(self.object() or {}) if one["type"] == type_] or [{}]
        return f"{found.get('status')} {found.get('reason')}"

    def poll_often(self) -> None:
        """As somebody may set it who does not want KEDA's 30 s; the operator leaves it alone."""
        self._kubectl.patch("scaledobject", self._name, {"spec": {"pollingInterval": POLL_S}})

    def scale_in_at_once(self) -> None:
        """As somebody may set it who does not want the autoscaler's 5 minutes."""
        behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        advanced = {"horizontalPodAutoscalerConfig": {"behavior": behavior}}
        self._kubectl.patch("scaledobject", self._name, {"spec": {"advanced": advanced}})

    def replicas(self) -> int:
        return int(self._kubectl.get(*self._workload)["spec"]["replicas"])

    def stays(self, replicas: int, seconds: float) -> None:
        """AssertionError if the replicas change within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.replicas() == replicas
            time.sleep(0.2)


def _example() -> dict[str, Any]:
    text = (ROOT / "examples" / "integrations" / "keda.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)["spec"]["autoscaling"]
    return found
