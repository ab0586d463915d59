"""Keep the webhook's certificate and its MutatingWebhookConfiguration up to date.

Only the leader writes to the cluster, and only after it has listed all policies. The Secret
contains a CA, with which each replica signs its own certificate, or a server certificate from
another program. A replica serves a new certificate only after the configuration has contained its
CA for one check interval.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from plimsoll_operator.admission.certificate import (
    CA_CERTIFICATE_LIFETIME,
    SERVER_CERTIFICATE_LIFETIME,
    Certificate,
    create_ca_certificate,
    create_server_certificate,
    is_ca_certificate,
    needs_renewal,
    split_bundle,
)
from plimsoll_operator.admission.configuration import (
    WebhookAddress,
    build_configuration,
    has_equal_webhooks,
)
from plimsoll_operator.admission.review import PolicyCache
from plimsoll_operator.config import Config, WebhookSettings
from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

SECRET_KIND = Kind("Secret", "", "v1", "secrets", "")
CONFIGURATION_KIND = Kind(
    "MutatingWebhookConfiguration",
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "",
)
BUNDLE_OVERLAP = datetime.timedelta(days=1)
"""Time for which the API server also trusts the previous CA bundle."""
SECRET_KEYS = ("tls.crt", "tls.key", "ca.crt")


class WebhookMetrics(Protocol):
    """Metrics of the webhook."""

    def count_admitted(self, result: str, count: int = 1) -> None:
        """Increase the number of reviews with ``result`` by ``count``."""

    def set_certificate_expiry(self, secret: str, expires_at_s: float) -> None:
        """Set the time at which the certificate in ``secret`` expires, in Unix seconds."""

    def add_webhook_health(self, secret: str, find_problem: Callable[[], str | None]) -> None:
        """Add the metric of the webhook's health; ``find_problem`` returns None if healthy."""


class WebhookReconciler:
    """Maintenance loop for the webhook's Secret and configuration; every replica runs it."""

    def __init__(
        self,
        api: Api,
        policies: PolicyCache,
        webhook: WebhookSettings,
        config: Config,
        is_leader: Callable[[], bool],
        folder: Path,
        metrics: WebhookMetrics,
        are_policies_known: Callable[[], bool],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._api, self._policies, self._webhook = api, policies, webhook
        self._address = WebhookAddress(webhook.namespace, webhook.name, webhook.url)
        self._secret = f"{webhook.namespace}/{webhook.name}"
        self._intervals, self._is_leader, self._are_policies_known = (
            config.intervals,
            is_leader,
            are_policies_known,
        )
        self._metrics, self._now = metrics, now
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self._secret_certificate: Certificate | None = None
        """CA in the Secret, or a server certificate that another program writes."""
        self._previous_bundle: tuple[bytes, datetime.datetime] | None = None
        """Previous bundle, and the time until which the API server trusts it."""
        self._trusted_bundle: tuple[bytes, float] | None = None
        """Bundle in the configuration, and the monotonic time at which this replica first read
        it."""
        self._current: Certificate | None = None
        self._last_full_check_at = self._last_check_at = float("-inf")
        self._applied_configuration: Object | None = None
        self._problem = f"Secret {self._secret} has not been read yet"
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.serving = asyncio.Event()
        """Event that is set once a certificate is loaded."""

    def is_current(self) -> bool:
        """Report whether the API server calls this webhook for the pods of all current policies."""
        recent = time.monotonic() - self._last_check_at < self._intervals.webhook_current
        written = self._applied_configuration is not None and self._are_policies_known()
        return recent and self.serving.is_set() and written

    def find_problem(self) -> str | None:
        """Return why the API server cannot call this replica; None if it can."""
        current = self._current
        if current is None:
            return self._problem or "the webhook has not loaded a certificate yet"
        if current.expires_at <= self._now():
            return f"the webhook's certificate has expired: {self._problem}".strip()
        if self._trusted_bundle is None:
            return (
                f"MutatingWebhookConfiguration {self._webhook.name} does not trust the webhook's"
                " certificate yet: wait until the leader updates it"
            )
        return None

    def is_waiting_for_leader(self) -> bool:
        """Report whether this replica is a standby that needs the leader to write first.

        Such a replica must still become ready. Otherwise, an upgrade from a release without the
        webhook would never replace the leader.
        """
        missing = self._trusted_bundle is None or (
            self._current is None and not self._webhook.is_secret_external
        )
        return missing and not self._is_leader()

    async def run(self) -> None:
        """Run :meth:`check` in a loop until cancelled.

        Raises ApiError, OSError or TimeoutError if a request to the API server fails.
        """
        while True:
            await self.check()
            await asyncio.sleep(self._intervals.webhook_policies)

    async def check(self) -> None:
        """Compare the certificate and the configuration with the cluster, and repair them."""
        overdue = time.monotonic() - self._last_full_check_at >= self._intervals.webhook_check
        full = overdue or self.find_problem() is not None
        if full:
            self._store_secret_certificate(await self._read_secret_certificate())
        if self._secret_certificate is not None:
            await self._apply_configuration(self._secret_certificate, full)
            self._serve(self._secret_certificate)
        self._last_check_at = time.monotonic()
        if full:
            self._last_full_check_at = self._last_check_at

    async def _read_secret_certificate(self) -> Certificate | None:
        """Return the certificate in the Secret, or None. The leader creates or renews a CA."""
        secret = await self._api.get(SECRET_KIND, self._address.namespace, self._webhook.name)
        certificate, problem = _parse_certificate_secret(secret, self._secret)
        if (
            certificate is not None
            and not self._webhook.is_secret_external
            and not is_ca_certificate(certificate)
        ):
            certificate, problem = (
                None,
                (
                    f"Secret {self._secret} contains no CA certificate: wait until the leader"
                    " creates one"
                ),
            )
        if not self._webhook.is_secret_external and needs_renewal(
            certificate, self._now(), CA_CERTIFICATE_LIFETIME
        ):
            if self._is_leader():
                certificate, problem = await self._create_ca_certificate(), ""
            elif not problem:
                problem = (
                    f"the CA certificate in Secret {self._secret} expires soon: wait until the"
                    " leader renews it"
                )
        if problem and problem != self._problem:
            log.error("webhook: %s", problem)
        self._problem = problem
        return certificate

    async def _create_ca_certificate(self) -> Certificate:
        ca = create_ca_certificate(self._now())
        texts = zip(SECRET_KEYS, (ca.certificate, ca.key, ca.bundle), strict=True)
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._webhook.name, "namespace": self._address.namespace},
            "data": {key: base64.b64encode(text).decode() for key, text in texts},
        }
        try:
            await self._api.apply(SECRET_KIND, body)
        except ApiError as error:
            self._problem = f"cannot write Secret {self._secret}: {error}"
            raise
        log.info(
            "created a CA certificate for the webhook, which expires at %s",
            ca.expires_at.isoformat(),
        )
        return ca

    # If ``source`` is None, the previous content stays.
    def _store_secret_certificate(self, source: Certificate | None) -> None:
        if source is None:
            return
        if (
            self._secret_certificate is not None
            and self._secret_certificate.bundle != source.bundle
        ):
            self._previous_bundle = (self._secret_certificate.bundle, self._now() + BUNDLE_OVERLAP)
        self._secret_certificate = source

    async def _apply_configuration(self, source: Certificate, force_check: bool) -> None:
        """Write the configuration if this is the leader, and read which bundle it contains."""
        policies, bundle = self._policies.list_all(), source.bundle
        if self._previous_bundle is not None and self._now() < self._previous_bundle[1]:
            bundle += self._previous_bundle[0]
        desired = build_configuration(self._webhook.name, policies, self._address, bundle)
        may_write = self._is_leader() and self._are_policies_known()
        if not (may_write and desired != self._applied_configuration) and not force_check:
            return
        live = await self._api.get(CONFIGURATION_KIND, "", self._webhook.name)
        if may_write and (live is None or not has_equal_webhooks(desired, live)):
            live = await self._api.apply(CONFIGURATION_KIND, desired)
            log.info("updated the MutatingWebhookConfiguration for %d policies", len(policies))
        if may_write:
            self._applied_configuration = desired
        if live is None or not is_bundle_trusted(live, source.bundle):
            self._trusted_bundle = None
        elif self._trusted_bundle is None or self._trusted_bundle[0] != source.bundle:
            self._trusted_bundle = (source.bundle, time.monotonic())

    def _serve(self, source: Certificate) -> None:
        """Serve a new certificate from ``source`` if one is due and the API server trusts it."""
        current, now = self._current, self._now()
        if current is not None and current.expires_at > now:
            since = self._trusted_bundle[1] if self._trusted_bundle is not None else float("inf")
            settled = time.monotonic() - since >= self._intervals.webhook_check
            if current.bundle != source.bundle and not settled:
                return
        if self._webhook.is_secret_external:
            if source != current:
                self._load_certificate(source)
        elif (
            current is None
            or current.bundle != source.bundle
            or needs_renewal(
                current, now, min(SERVER_CERTIFICATE_LIFETIME, source.expires_at - now)
            )
            or not current.is_valid_for(self._address.host)
        ):
            self._load_certificate(create_server_certificate(self._address.host, source, now))

    def _load_certificate(self, certificate: Certificate) -> None:
        self.certfile.write_bytes(certificate.certificate)
        self.keyfile.touch(mode=0o600)
        self.keyfile.write_bytes(certificate.key)
        try:
            self.context.load_cert_chain(self.certfile, self.keyfile)
        except ssl.SSLError as error:
            self._problem = (
                f"Secret {self._secret}: the key in tls.key does not match the certificate in"
                f" tls.crt ({error}): renew the certificate"
            )
            log.error("webhook: %s", self._problem)
            return
        self._current = certificate
        self._metrics.set_certificate_expiry(self._secret, certificate.expires_at.timestamp())
        self.serving.set()


def _parse_certificate_secret(secret: Object | None, name: str) -> tuple[Certificate | None, str]:
    """Return the Secret's certificate, or None and a message that says how to fix the Secret."""
    if secret is None:
        return None, (
            f"Secret {name} does not exist: create it, or restart the program that writes it"
        )
    data = secret.get("data") or {}
    if lacks := [key for key in SECRET_KEYS if not data.get(key)]:
        return None, (
            f"Secret {name} has no {' and '.join(lacks)}: use an issuer that provides ca.crt,"
            " which the API server needs to verify the webhook, or let the operator create the"
            " certificate"
        )
    try:
        certificate = Certificate(*(base64.b64decode(data[key]) for key in SECRET_KEYS))
        _ = certificate.expires_at
    except (ValueError, binascii.Error) as error:
        return None, (
            f"Secret {name}: tls.crt contains no valid certificate ({error}): renew the certificate"
        )
    if not split_bundle(certificate.bundle):
        return None, f"Secret {name}: ca.crt contains no valid certificate: renew the certificate"
    return certificate, ""


def is_bundle_trusted(live: Object, bundle: bytes) -> bool:
    """Report whether each webhook in ``live`` trusts every certificate in ``bundle``."""
    clients = [webhook.get("clientConfig") or {} for webhook in live.get("webhooks") or ()]
    desired = set(split_bundle(bundle))
    bundles = {client.get("caBundle") or "" for client in clients}
    return all(desired <= set(split_bundle(base64.b64decode(trusted))) for trusted in bundles)
