"""A mutating webhook of somebody else, which rewrites what an operator applies.

Registries, policies and defaults of a platform team do such things to each object that they see.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.lab.certs import Authority
from tests.lab.kube import Kube

Object = dict[str, Any]
NAME = "rewriter.example.org"
REGISTRY = "mirror.example.org/"
KINDS = {
    "": ["configmaps", "serviceaccounts", "services"],
    "apps": ["deployments"],
    "autoscaling": ["horizontalpodautoscalers"],
    "policy": ["poddisruptionbudgets"],
}


def rewrite(item: Object) -> None:
    """Images, amounts, names, booleans and numbers change; fields are added and taken away."""
    item["metadata"].setdefault("annotations", {})["example.org/seen"] = "true"
    spec = item.get("spec") or {}
    match item["kind"]:
        case "Deployment":
            pod = spec["template"]["spec"]
            for one in (*(pod.get("initContainers") or ()), *pod["containers"]):
                one["image"] = REGISTRY + one["image"].removeprefix(REGISTRY)
                one["resources"] = {"requests": {"cpu": "33m"}}
                one.pop("lifecycle", None)
            pod["terminationGracePeriodSeconds"] = 77
            spec["revisionHistoryLimit"] = 9
        case "Service":
            spec["sessionAffinity"] = "ClientIP"
        case "ServiceAccount":
            item["automountServiceAccountToken"] = True
        case "ConfigMap":
            item["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
        case "HorizontalPodAutoscaler":
            spec["maxReplicas"] = 3
        case "PodDisruptionBudget":
            spec["maxUnavailable"] = "34%"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)["request"]
        item = request["object"]
        patch = []
        if item["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by"):
            rewrite(item)
            paths = ("metadata", "spec", "automountServiceAccountToken")
            patch = [
                {"op": "add", "path": f"/{one}", "value": item[one]} for one in paths if one in item
            ]
        response: Object = {"uid": request["uid"], "allowed": True}
        if patch:
            text = base64.b64encode(json.dumps(patch).encode()).decode()
            response |= {"patchType": "JSONPatch", "patch": text}
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        data = json.dumps(answer | {"response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


@contextmanager
def rewriter(kube: Kube, folder: Path) -> Iterator[None]:
    """Rewrite objects of the namespace of ``kube`` that say who manages them."""
    authority = Authority(folder)
    authority.serving("rewriter", "rewriter", ["127.0.0.1"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "rewriter.crt", folder / "rewriter.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = f"rewriter-{kube.namespace}"
    kube.apply({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [{
            "name": NAME,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": kube.namespace}},
            "clientConfig": {
                "url": f"https://127.0.0.1:{server.server_port}/",
                "caBundle": base64.b64encode((folder / "ca.crt").read_bytes()).decode(),
            },
            "rules": [
                {"apiGroups": [group], "apiVersions": ["*"], "resources": plurals,
                 "operations": ["CREATE", "UPDATE"]}
                for group, plurals in KINDS.items()
            ],
        }],
    })  # fmt: skip
    try:
        yield
    finally:
        kube.delete("mutatingwebhookconfiguration", name)
        server.shutdown()
        server.server_close()
