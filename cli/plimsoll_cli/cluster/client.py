"""Client of the API server for the command line: paginated lists, single objects, access reviews.

Errors are raised as :class:`RunError`, whose message names the cause, such as a missing permission
with the RBAC rule that grants it.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import urllib3
import yaml
from kubernetes import client as k8s
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.util.ssl_ import create_urllib3_context

from plimsoll_api.names import API_GROUP, CRD_VERSION
from plimsoll_cli.errors import RunError, UsageError

Object = dict[str, Any]
MAX_OBJECTS_PER_PAGE = 500
MAX_LIST_RESTARTS = 5
"""Maximum number of times that a list is read again; the API server keeps its state for five
minutes."""
REQUEST_TIMEOUT_S = 15.0


class Cluster:
    """Client of one cluster; if ``namespace`` is None, lists include all namespaces."""

    # Raises UsageError if no cluster is configured.
    def __init__(
        self,
        kubeconfig: Path | None = None,
        context: str | None = None,
        namespace: str | None = None,
        all_namespaces: bool = False,
    ) -> None:
        configuration = k8s.Configuration()
        file = str(kubeconfig) if kubeconfig else None
        is_present = file is not None or _is_kubeconfig_present()
        if not is_present and "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise NoClusterError(
                f"no cluster is configured: {_list_kubeconfigs()} does not exist: use --kubeconfig"
                " or KUBECONFIG"
            )
        try:
            if is_present:
                config.load_kube_config(file, context, configuration)
                current = _read_namespace(file, context)
            else:
                config.load_incluster_config(configuration)
                current = "default"
        except yaml.YAMLError as error:
            where = " ".join(str(error).split())
            raise UsageError(
                f"{file or _list_kubeconfigs()}: the kubeconfig is not valid YAML: {where}"
            ) from None
        except (ConfigException, OSError) as error:
            reason = str(error).removeprefix("Invalid kube-config file. ").rstrip(".")
            raise UsageError(
                f"{file or _list_kubeconfigs()}: the kubeconfig cannot be used: {reason}"
            ) from None
        except (AttributeError, TypeError, ValueError):
            raise UsageError(f"{file or _list_kubeconfigs()}: the file is no kubeconfig") from None
        configuration.retries = False
        self.host = str(configuration.host)
        self.namespace = None if all_namespaces else namespace or current
        self.configuration = configuration
        self._api = k8s.ApiClient(configuration)
        self._api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = _make_ssl_context(
            configuration
        )

    def get(self, path: str, **query: Any) -> Object:
        """Return the JSON response to a GET request. Raises RunError."""
        return self._call("GET", path, query)

    def create(self, path: str, body: Object, **query: Any) -> Object:
        """Create an object in the collection at ``path``, and return it. Raises RunError."""
        return self._call("POST", path, query, body)

    def list_custom_objects(self, plural: str, **query: Any) -> Iterator[Object]:
        """Yield the objects of a Plimsoll kind. Raises RunError."""
        yield from self.list_objects(f"/apis/{API_GROUP}/{CRD_VERSION}", plural, **query)

    def list_objects(
        self, root: str, plural: str, namespace: str | None = None, **query: Any
    ) -> Iterator[Object]:
        """Yield the objects of a kind in ``namespace``, by default in the client's namespace.

        An object is yielded only once, even if the list expires and is read again. Raises RunError.
        """
        chosen = namespace or self.namespace
        where = f"/namespaces/{chosen}" if chosen else ""
        path, given = f"{root}{where}/{plural}", set()
        continue_token, expired = None, 0
        while True:
            page = query | ({"continue": continue_token} if continue_token else {})
            try:
                answer = self._call("GET", path, {"limit": MAX_OBJECTS_PER_PAGE} | page)
            except _ExpiredError:
                expired += 1
                if expired > MAX_LIST_RESTARTS:
                    raise RunError(
                        f"GET {path}: the list expired {expired} times before all pages were read:"
                        " try again, or select one namespace with -n"
                    ) from None
                continue_token = None  # restart, and skip the objects already yielded
                continue
            for item in answer.get("items", []):
                meta = item["metadata"]
                key = meta.get("namespace"), meta["name"]
                if key not in given:
                    given.add(key)
                    yield item
            continue_token = answer.get("metadata", {}).get("continue")
            if not continue_token:
                return

    def get_custom_object(self, plural: str, name: str) -> Object | None:
        """Return a Plimsoll object in the client's namespace; None if it does not exist."""
        namespace = self.namespace or "default"
        try:
            return self.get(
                f"/apis/{API_GROUP}/{CRD_VERSION}/namespaces/{namespace}/{plural}/{name}"
            )
        except NotFoundError:
            self._check_crd(plural)
            return None

    def check_namespace(self) -> None:
        """Raise UsageError if the client's namespace is known not to exist."""
        if self.namespace is None:
            return
        try:
            self.get(f"/api/v1/namespaces/{self.namespace}")
        except NotFoundError:
            raise UsageError(
                f"namespace {self.namespace} does not exist on {self.host}: select another one"
                " with -n; to list them, run: kubectl get namespaces"
            ) from None
        except ForbiddenError:
            return

    def _call(self, method: str, path: str, query: Object, body: Object | None = None) -> Object:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            request = self._api.param_serialize(
                method, path, query_params=list(query.items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            response = self._api.call_api(*request, _request_timeout=REQUEST_TIMEOUT_S)
            data = response.read()
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            # urllib3 begins with the connection, as HTTPConnection(host='h', port=1).
            text = str(reason).rpartition("): ")[2]
            raise RunError(f"the API server {self.host} does not answer: {text}") from None
        if response.status >= 300:
            self._raise_for_status(response.status, response.reason or "", method, path)
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # for example the login page of a proxy
            raise RunError(
                f"{self.host} answers {path} without JSON: it is no API server, check the"
                " kubeconfig and proxies"
            )
        return answer

    def _raise_for_status(self, status: int, reason: str, method: str, path: str) -> NoReturn:
        if status == 410:
            raise _ExpiredError from None
        if status == 404:
            if path.startswith(f"/apis/{API_GROUP}/{CRD_VERSION}/") and not _is_single_object(path):
                self._check_crd(path.rsplit("/", 1)[1])
            raise NotFoundError(f"{path} does not exist") from None
        if status == 401:
            raise RunError(
                f"the API server {self.host} rejected your credentials: log in again"
            ) from None
        if status == 403:
            raise ForbiddenError(format_denied_message(method, path)) from None
        raise RunError(f"{method} {path}: HTTP {status}: {reason}") from None

    # Raises RunError if the CRD lacks the version that this command needs.
    def _check_crd(self, plural: str) -> None:
        try:
            group = self.get(f"/apis/{API_GROUP}")
        except NotFoundError:
            raise RunError(
                f"the CRDs of {API_GROUP} are not installed on {self.host}: install the"
                " chart, or run kubectl apply --server-side -k config"
            ) from None
        versions = [one["version"] for one in group["versions"]]
        if CRD_VERSION not in versions:
            raise RunError(
                f"the versions of {plural}.{API_GROUP} on the cluster are {', '.join(versions)},"
                f" but this plimsoll command needs {CRD_VERSION}: use the command of the installed"
                " version, or upgrade the CRDs"
            )


# By default, Python 3.13 also requires key identifiers, which the CAs of many clusters lack, such
# as those of EKS. The connection pool adds the cluster's CA.
def _make_ssl_context(configuration: k8s.Configuration) -> ssl.SSLContext:
    verify = ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE
    context = create_urllib3_context(cert_reqs=verify)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not (configuration.ssl_ca_cert or configuration.ca_cert_data):
        context.load_default_certs()
    return context


class NoClusterError(UsageError):
    """There is no kubeconfig, and the program does not run in a pod."""


class NotFoundError(RunError):
    """The API server responded with status 404."""


class ForbiddenError(RunError):
    """The API server responded with status 403; the message contains the missing RBAC rule."""


class _ExpiredError(Exception):
    """The API server responded with status 410: the continue token of a list has expired."""


def _is_single_object(path: str) -> bool:
    return get_required_rule("GET", path)[0] == "get"


def get_required_rule(method: str, path: str) -> tuple[str, str, str, str | None]:
    """Return the verb, API group, resource and namespace of the RBAC rule for a request.

    The namespace is None for a cluster-scoped request.
    """
    parts = [part for part in path.split("?")[0].split("/") if part]
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = None
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = "/".join([rest[0], *rest[2:3]])
    verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}.get(method)
    if verb is None:
        verb = "get" if len(rest) > 1 else "list"
    return verb, group, resource, namespace


def format_denied_message(method: str, path: str) -> str:
    """Return the message for a missing permission, with the RBAC rule that grants it."""
    verb, group, resource, namespace = get_required_rule(method, path)
    what = f"{resource}.{group}" if group else resource
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    kind = "Role" if namespace else "ClusterRole"
    rule = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
    text = yaml.safe_dump({"rules": [rule]}, sort_keys=False, default_flow_style=None).strip()
    return (
        f"you are not allowed to {verb} {what} {where}; a {kind} with this rule grants the"
        f" permission:\n\n{text}"
    )


def _list_kubeconfigs() -> str:
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def _is_kubeconfig_present() -> bool:
    return any(Path(file).is_file() for file in _list_kubeconfigs().split(os.pathsep) if file)


def _read_namespace(file: str | None, context: str | None) -> str:
    contexts, active = config.list_kube_config_contexts(file)
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")
