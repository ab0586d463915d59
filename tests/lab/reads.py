"""Objects by the names that kubectl knows, read over one connection that stays open.

A ``kubectl get`` takes 0.1 s of CPU to start, and tests look ten times a second.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as k8s
from kubernetes import config
from urllib3.util.ssl_ import create_urllib3_context

Document = dict[str, Any]
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
TIMEOUT_S = 60.0
LATER = urllib3.Retry(
    total=20, connect=0, read=0, status_forcelist=(429,), backoff_factor=0.1, raise_on_status=False
)
"""A server that asks for patience is asked again, as kubectl does."""


@dataclass(frozen=True)
class Resource:
    """Where the objects of one kind are."""

    root: str
    plural: str
    namespaced: bool

    def path(self, namespace: str, name: str = "") -> str:
        """The path of one object, or of all of them without ``name``."""
        where = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{self.root}{where}/{self.plural}" + (f"/{quote(name)}" if name else "")


class Reader:
    """Reads as one user of one cluster; what fails is an AssertionError, as with kubectl."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = k8s.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        configuration.retries = False
        self._host = str(configuration.host)
        self._api = k8s.ApiClient(configuration)
        verify = ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
        context = create_urllib3_context(cert_reqs=verify)
        if not (configuration.ssl_ca_cert or configuration.ca_cert_data):
            context.load_default_certs()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the lab's CA names no key identifier
        self._pool = self._api.rest_client.pool_manager
        self._pool.connection_pool_kw["ssl_context"] = context
        self._resources: dict[str, Resource] = {}

    def get(self, kind: str, name: str, namespace: str) -> Document | None:
        """One object, None where there is none."""
        path = self._resource(kind).path(namespace, name)
        status, body = self._read(path)
        if status == 404 and (body.get("details") or {}).get("name") == name:
            return None
        assert status == 200, f"GET {path}: {status} {body.get('message', body)}"
        return _shown(body)

    def list(self, kinds: str, selector: str, namespace: str) -> list[Document]:
        """All objects of the kinds, which commas part, that have the labels of ``selector``."""
        found: list[Document] = []
        for kind in kinds.split(","):
            path = self._resource(kind).path(namespace)
            status, body = self._read(path, labelSelector=selector)
            if status == 404:  # a version that is no longer served
                self._resources.clear()
                path = self._resource(kind).path(namespace)
                status, body = self._read(path, labelSelector=selector)
            assert status == 200, f"GET {path}: {status} {body.get('message', body)}"
            # The items of a list of a built-in kind do not name it.
            named = {"apiVersion": body["apiVersion"], "kind": body["kind"].removesuffix("List")}
            found += [_shown(named | item) for item in body["items"]]
        return found

    def _resource(self, kind: str) -> Resource:
        if kind.lower() not in self._resources:
            self._resources = self._discovered()
        assert kind.lower() in self._resources, f"the server has no resource type {kind!r}"
        return self._resources[kind.lower()]

    def _discovered(self) -> dict[str, Resource]:
        """Every name that a kind goes by; the first group and version that has one decides."""
        found: dict[str, Resource] = {}
        for root in ("/api", "/apis"):
            status, body = self._read(root, accept=DISCOVERY)
            assert status == 200, f"GET {root}: {status} {body}"
            for group in body["items"]:
                group_name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    parts = [root, group_name, version["version"]]
                    for one in version.get("resources", ()):
                        resource = Resource(
                            "/".join(filter(None, parts)),
                            one["resource"],
                            one["scope"] == "Namespaced",
                        )
                        for name in _names(one):
                            found.setdefault(name, resource)
                            found.setdefault(f"{name}.{group_name}", resource)
        return found

    def _read(
        self, path: str, accept: str = "application/json", **query: str
    ) -> tuple[int, Document]:
        given = urlencode({key: value for key, value in query.items() if value})
        headers = {"Accept": accept}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        try:
            answer = self._pool.request(
                "GET",
                f"{self._host}{path}?{given}",
                headers=headers,
                timeout=TIMEOUT_S,
                retries=LATER,
            )
        except urllib3.exceptions.HTTPError as error:
            raise AssertionError(f"GET {path}: {error}") from error
        try:
            body = json.loads(answer.data)
        except ValueError:
            body = {"message": answer.data.decode(errors="replace")}
        return answer.status, body


def _shown(item: Document) -> Document:
    """As kubectl shows it: who wrote which field is left out."""
    item["metadata"].pop("managedFields", None)
    return item


def _names(resource: Document) -> list[str]:
    kind = (resource.get("responseKind") or {}).get("kind", "")
    names = [resource["resource"], resource.get("singularResource", ""), kind.lower()]
    return [name for name in (*names, *resource.get("shortNames", ())) if name]


def reader(kubeconfig: Path) -> Reader:
    """The reader of a kubeconfig as the file is now: a later lab may write another there."""
    return _reader(kubeconfig, kubeconfig.read_bytes())


@cache
def _reader(kubeconfig: Path, content: bytes) -> Reader:
    return Reader(kubeconfig)
