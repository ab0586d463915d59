"""How kopf logs in to the API server: with the pod's own account or by a kubeconfig."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from typing import Any

import kopf


class Login(kopf.ConnectionInfo):
    """A login that verifies the API server's certificate as kubectl does.

    Python 3.13 also demands key identifiers, which the CAs of many clusters, EKS's among them,
    lack.
    """

    def as_ssl_context(self) -> ssl.SSLContext:
        """Return kopf's context without VERIFY_X509_STRICT."""
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    @classmethod
    def of(cls, found: kopf.ConnectionInfo) -> Login:
        """Copy a login so that it verifies like this."""
        return cls(
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        )


def in_pod(**given: Any) -> Login | None:
    """Log in with the pod's own account, else with the user's default file."""
    account = kopf.login_with_service_account(**given)
    return Login.of(by_address(account, os.environ)) if account else by_file(**given)


def by_address(account: kopf.ConnectionInfo, environ: Mapping[str, str]) -> kopf.ConnectionInfo:
    """Return the same account at the address that the kubelet gives every container.

    kopf asks for the server by its name: without the cluster's DNS no watch would begin, while
    everything else that the operator sends goes to the address.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        return account
    host = f"[{host}]" if ":" in host else host
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    return dataclasses.replace(account, server=f"https://{host}:{port}")


def by_file(**given: Any) -> Login | None:
    """Log in with the file that KUBECONFIG names."""
    found = kopf.login_with_kubeconfig(**given)
    return Login.of(found) if found else None
