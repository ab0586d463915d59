"""The real endpoint picker of the Gateway API Inference Extension, asked as Envoy asks it."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.lab import binaries
from tests.lab.kube import eventually
from tests.lab.lab import Lab
from tests.ports import free_port

HOST = "127.0.0.1"
NAME = "endpoint-picker"
CLIENT = Path(__file__).parent / "envoy"
READY_S = 60.0


def build() -> Path:
    """The folder of the picker and its client; built once, in about 4 minutes."""
    packages = {"epp": "cmd/epp", "envoy": "cmd/envoy"}
    return binaries.programs(binaries.INFERENCE, packages, own=CLIENT)


class EndpointPicker:
    """The picker of one InferencePool, with its own defaults, beside the lab's control plane."""

    def __init__(self, lab: Lab, namespace: str, pool: str) -> None:
        self._processes, self._folder = lab.plane.processes, build()
        self._kubeconfig, self._pool = lab.kubeconfig, (namespace, pool)
        self._metrics, self._port = free_port(), free_port()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Returns when it serves its metrics: it knows its pool's pods a moment later."""
        namespace, pool = self._pool
        argv = ["env", f"KUBECONFIG={self._kubeconfig}", str(self._folder / "epp")]
        argv += [f"--pool-namespace={namespace}", f"--pool-name={pool}"]
        argv += [f"--grpc-port={self._port}", f"--grpc-health-port={free_port()}"]
        argv += [f"--metrics-port={self._metrics}", "--metrics-endpoint-auth=false"]
        argv += ["--refresh-prometheus-metrics-interval=200ms"]
        self._processes.start(NAME, [*argv, "--secure-serving=false", "--tracing=false"])
        eventually(self._serves, "the endpoint picker serves", READY_S)
        self._envoy = subprocess.Popen(
            [str(self._folder / "envoy"), f"{HOST}:{self._port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> None:
        """Ends the client and the picker."""
        self._envoy.kill()
        self._envoy.wait()
        self._processes.stop(NAME)

    def pick(self, body: dict[str, Any]) -> str:
        """The endpoint for a request, ADDRESS:PORT; ValueError with the status of a refusal."""
        stdin, stdout = self._envoy.stdin, self._envoy.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            print(json.dumps(body), file=stdin, flush=True)
            answer = stdout.readline().strip()
        if ":" not in answer or " " in answer:
            raise ValueError(f"the picker chose no endpoint: {answer}")
        return answer

    def samples(self, name: str) -> list[Sample]:
        """Samples of one of the picker's own metrics."""
        with urllib.request.urlopen(f"http://{HOST}:{self._metrics}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return [one for family in families for one in family.samples if one.name == name]

    def _serves(self) -> bool:
        self._processes.check(NAME)
        try:
            return bool(self.samples("inference_extension_info"))
        except OSError:
            return False
