"""Build the MutatingWebhookConfiguration, which selects the pods that the API server reviews.

Each policy has a webhook with its own selector. Policies beyond the limit share a few webhooks,
which select whole namespaces.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.kinds import Object

WEBHOOK_TIMEOUT_S = 2
MAX_WEBHOOKS = 64
MAX_SELECTORS_CHARS = 1 << 19
"""Maximum total size of the selectors; etcd accepts objects of up to 1.5 MiB."""
MAX_NAMESPACES = 256
"""Maximum number of namespaces per webhook, for policies beyond :data:`MAX_WEBHOOKS`."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
NOT_MANAGED_EXPRESSION = {"key": SERVICE_LABEL, "operator": "DoesNotExist"}


@dataclass(frozen=True)
class WebhookAddress:
    """Address at which the API server reaches the webhook: a Service, or a URL."""

    namespace: str
    service: str
    url: str | None = None

    @property
    def host(self) -> str:
        """Host name for which the certificate must be valid."""
        if self.url is not None:
            host = self.url.partition("://")[2].partition("/")[0]
            return host.rpartition(":")[0].strip("[]") or host
        return f"{self.service}.{self.namespace}.svc"

    def make_client_config(self, bundle: bytes) -> Object:
        """Return the webhook's ``clientConfig``, which trusts only certificates in ``bundle``."""
        trusted = {"caBundle": base64.b64encode(bundle).decode()}
        if self.url is not None:
            return {"url": self.url} | trusted
        service = {"namespace": self.namespace, "name": self.service, "path": "/pods", "port": 443}
        return {"service": service} | trusted


def build_configuration(
    name: str, policies: Sequence[SupervisionPolicy], address: WebhookAddress, bundle: bytes
) -> Object:
    """Return the complete MutatingWebhookConfiguration for server-side apply."""
    client = address.make_client_config(bundle)
    own: list[SupervisionPolicy] = []
    shared: list[SupervisionPolicy] = []
    remaining_chars = MAX_SELECTORS_CHARS
    for policy in interleave_by_namespace(policies):
        size = len(json.dumps(policy.spec.selector.to_manifest()))
        fits = len(own) < MAX_WEBHOOKS and size <= remaining_chars
        (own if fits else shared).append(policy)
        remaining_chars -= size if fits else 0
    webhooks = [
        _make_webhook(
            f"{_make_webhook_name(one.metadata.namespace, one.metadata.name)}.pods.plimsoll.dev",
            client,
            [one.metadata.namespace],
            one.spec.selector.to_manifest(),
        )
        for one in own
    ]
    namespaces = sorted({policy.metadata.namespace for policy in shared})
    for start in range(0, len(namespaces), MAX_NAMESPACES):
        chunk = namespaces[start : start + MAX_NAMESPACES]
        label = f"shared-{start // MAX_NAMESPACES}.pods.plimsoll.dev"
        webhooks.append(_make_webhook(label, client, chunk, {}))
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name, "namespace": ""},
        "webhooks": webhooks,
    }


def interleave_by_namespace(policies: Sequence[SupervisionPolicy]) -> list[SupervisionPolicy]:
    """Return the policies in round-robin order of their namespaces."""
    counts: Counter[str] = Counter()
    ranked = []
    for policy in policies:
        ranked.append((counts[policy.metadata.namespace], policy))
        counts[policy.metadata.namespace] += 1
    return [policy for _, policy in sorted(ranked, key=lambda pair: pair[0])]


def has_equal_webhooks(desired: Object, live: Object) -> bool:
    """Report whether the configuration ``live`` has the same webhooks as ``desired``."""
    return _index_webhooks_by_name(desired.get("webhooks")) == _index_webhooks_by_name(
        live.get("webhooks")
    )


def _index_webhooks_by_name(webhooks: Iterable[Any] | None) -> dict[str, Any]:
    return {webhook["name"]: webhook for webhook in webhooks or ()}


def _make_webhook(
    name: str, client_config: Object, namespaces: list[str], selector: Object
) -> Object:
    within = {"key": NAMESPACE_LABEL, "operator": "In", "values": namespaces}
    # Set every field: a default that the server fills in would appear as a change.
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config,
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "namespaceSelector": {"matchExpressions": [within]},
        "objectSelector": selector
        | {"matchExpressions": [*selector.get("matchExpressions", ()), NOT_MANAGED_EXPRESSION]},
        # Another webhook may add a container afterwards, such as a service mesh's proxy.
        "reinvocationPolicy": "IfNeeded",
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
        "sideEffects": "None",
        "timeoutSeconds": WEBHOOK_TIMEOUT_S,
    }


# A digest, because the namespace and the name together may be too long.
def _make_webhook_name(namespace: str, name: str) -> str:
    return hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:16]
