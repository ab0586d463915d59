"""Objects by the names that kubectl knows, read and written over one connection that stays open.

A ``kubectl get`` takes 0.1 s of CPU to start, and tests look ten times a second. ``kubectl apply``
takes as much again of the API server, whose OpenAPI documents it reads each time.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as k8s
from kubernetes import config
from urllib3.util.ssl_ import create_urllib3_context

from plimsoll_cli import yaml_text

Document = dict[str, Any]
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
JSON, MERGE, APPLY = (
    f"application/{kind}" for kind in ("json", "merge-patch+json", "apply-patch+yaml")
)
STRICT = {"fieldManager": "kubectl", "fieldValidation": "Strict"}
"""As kubectl: a field that the API server does not know is an error."""
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


class Refused(AssertionError):
    """The API server refused a request; the text is its message."""


class NotFound(Refused):
    """It has no such object."""


class Objects:
    """Those of one cluster, to one user; what fails is an AssertionError, as with kubectl."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = k8s.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        configuration.retries = False
        self._host = str(configuration.host)
        self._api = k8s.ApiClient(configuration)
        verify = ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
        context = create_urllib3_context(cert_reqs=verify)
        if configuration.ssl_ca_cert or configuration.ca_cert_data:
            context.load_verify_locations(
                configuration.ssl_ca_cert, cadata=configuration.ca_cert_data
            )
        else:
            context.load_default_certs()
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the lab's CA names no key identifier
        self._pool = self._api.rest_client.pool_manager
        pool_arguments = self._pool.connection_pool_kw
        for name in ("ca_certs", "ca_cert_data", "cert_file", "key_file"):
            # urllib3 would load them again for each connection, which is not safe between threads.
            pool_arguments.pop(name, None)
        pool_arguments["ssl_context"] = context
        self._resources: dict[str, Resource] = {}

    def get(self, kind: str, name: str, namespace: str) -> Document | None:
        """One object, None where there is none."""
        path = self._resource(kind).path(namespace, name)
        status, body = self._ask("GET", path)
        if status == 404 and (body.get("details") or {}).get("name") == name:
            return None
        assert status == 200, f"GET {path}: {status} {body.get('message', body)}"
        return _shown(body)

    def list(self, kinds: str, selector: str, namespace: str) -> list[Document]:
        """All objects of the kinds, which commas part, that have the labels of ``selector``."""
        found: list[Document] = []
        for kind in kinds.split(","):
            path = self._resource(kind).path(namespace)
            status, body = self._ask("GET", path, labelSelector=selector)
            if status == 404:  # a version that is no longer served
                self._resources.clear()
                path = self._resource(kind).path(namespace)
                status, body = self._ask("GET", path, labelSelector=selector)
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
            status, body = self._ask("GET", root, accept=DISCOVERY)
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

    def create(self, item: Document, namespace: str, dry_run: bool) -> None:
        """Create ``item``; :class:`Refused` where the API server does not take it."""
        resource, place = self._place(item, namespace)
        dry = {"dryRun": "All" if dry_run else ""}
        self._write("POST", resource.path(place), JSON, item, **STRICT, **dry)

    def apply(self, item: Document, namespace: str, force: bool) -> None:
        """Apply ``item`` server-side, as kubectl; ``force`` takes the fields of other managers."""
        resource, place = self._place(item, namespace)
        path = resource.path(place, item["metadata"]["name"])
        self._write("PATCH", path, APPLY, item, force=str(force).lower(), **STRICT)

    def patch(
        self, kind: str, name: str, patch: Document, namespace: str, subresource: str = ""
    ) -> None:
        """Merge ``patch`` into an object, or into a subresource of it."""
        path = self._resource(kind).path(namespace, name)
        path += f"/{subresource}" if subresource else ""
        self._write("PATCH", path, MERGE, patch, **STRICT)

    def delete(self, kind: str, name: str, namespace: str, selector: str = "") -> None:
        """Begin to delete an object, or those that a selector finds where ``name`` is empty."""
        path = self._resource(kind).path(namespace, name)
        background = {"propagationPolicy": "Background"}
        self._write("DELETE", path, JSON, background, labelSelector=selector)

    def _place(self, item: Document, namespace: str) -> tuple[Resource, str]:
        """Where an object belongs: the namespace that it names goes before ``namespace``."""
        version = item["apiVersion"]
        group = version.rpartition("/")[0]
        resource = self._resource(f"{item['kind']}.{group}" if group else item["kind"])
        root = f"/apis/{version}" if group else f"/api/{version}"
        return replace(resource, root=root), item["metadata"].get("namespace", namespace)

    def _write(self, verb: str, path: str, content: str, body: Document, **query: str) -> None:
        # YAML, which server-side apply reads, has no surrogate pairs as JSON's escapes.
        text = yaml_text.dump(body) if content == APPLY else json.dumps(body)
        status, answer = self._ask(verb, path, body=text, content=content, **query)
        if status >= 300:
            kind = NotFound if status == 404 else Refused
            raise kind(answer.get("message", f"{verb} {path}: {status}"))

    def _ask(
        self,
        verb: str,
        path: str,
        accept: str = JSON,
        body: str | None = None,
        content: str = JSON,
        **query: str,
    ) -> tuple[int, Document]:
        given = urlencode({key: value for key, value in query.items() if value})
        headers = {"Accept": accept, "Content-Type": content}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, verb, None)
        try:
            answer = self._pool.request(
                verb,
                f"{self._host}{path}?{given}",
                body=body,
                headers=headers,
                timeout=TIMEOUT_S,
                retries=LATER,
            )
        except urllib3.exceptions.HTTPError as error:
            raise AssertionError(f"{verb} {path}: {error}") from error
        try:
            said = json.loads(answer.data)
        except ValueError:
            said = {"message": answer.data.decode(errors="replace")}
        return answer.status, said


def _shown(item: Document) -> Document:
    """As kubectl shows it: who wrote which field is left out."""
    item["metadata"].pop("managedFields", None)
    return item


def _names(resource: Document) -> list[str]:
    kind = (resource.get("responseKind") or {}).get("kind", "")
    names = [resource["resource"], resource.get("singularResource", ""), kind.lower()]
    return [name for name in (*names, *resource.get("shortNames", ())) if name]


def objects(kubeconfig: Path) -> Objects:
    """Those of a kubeconfig as the file is now: a later lab may write another there."""
    return _objects(kubeconfig, kubeconfig.read_bytes())


@cache
def _objects(kubeconfig: Path, content: bytes) -> Objects:
    return Objects(kubeconfig)
