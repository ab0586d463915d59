"""Upkeep of what admission needs: policies, certificate and webhook configuration.

Every replica reads policies and certificate; the leader alone writes the Secret and the
MutatingWebhookConfiguration. It lists and reads instead of watching: a standby has no watches, a
list of policies is short, and nothing that a watch could miss stays missed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from plimsoll_operator.admission.certificate import Certificate, due, make
from plimsoll_operator.admission.configuration import Address, configuration, same
from plimsoll_operator.admission.policies import Policies
from plimsoll_operator.config import CLOCKS, Clocks
from plimsoll_operator.kinds import POLICY, Kind, Object
from plimsoll_operator.runtime.client import Api

log = logging.getLogger(__name__)

SECRET = Kind("Secret", "", "v1", "secrets", "")
CONFIGURATION = Kind(
    "MutatingWebhookConfiguration",
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "",
)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Upkeep:
    """``run`` it in every replica; ``leading`` says whether this one may write."""

    def __init__(
        self,
        api: Api,
        policies: Policies,
        address: Address,
        name: str,
        namespaces: Sequence[str],
        leading: Callable[[], bool],
        folder: Path,
        provided: bool = False,
        served: Callable[[float], None] = lambda _: None,
        now: Callable[[], datetime.datetime] = _now,
        clocks: Clocks = CLOCKS,
    ) -> None:
        """Prepare the upkeep; ``folder`` is for the files of the certificate that is served.

        With ``provided``, somebody else, such as cert-manager, writes the Secret. ``served`` is
        called with the expiry, in Unix seconds, of each certificate that is served from then on.
        """
        self._api, self._policies, self._address, self._name = api, policies, address, name
        self._namespaces, self._leading = namespaces, leading
        self._provided, self._served, self._now = provided, served, now
        self._clocks = clocks
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self._current: Certificate | None = None
        self._checked = self._turned = float("-inf")
        self._written: Object | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.serving = asyncio.Event()
        """Set once there is a certificate to serve with."""

    def current(self) -> bool:
        """Whether the API server asks this webhook about the pods of the present policies."""
        recent = time.monotonic() - self._turned < self._clocks.webhook_current
        return recent and self.serving.is_set() and self._written is not None

    async def run(self) -> None:
        """Keep everything current until canceled.

        Raises ApiError, OSError or TimeoutError if the API server refuses or does not answer: then
        all stays as it was.
        """
        while True:
            await self.turn()
            await asyncio.sleep(self._clocks.webhook_policies)

    async def turn(self) -> None:
        """One turn."""
        items: list[Object] = []
        for namespace in self._namespaces or (None,):
            async for page, _ in self._api.pages(POLICY, namespace):
                items += page
        self._policies.replace(items)
        check = (
            time.monotonic() - self._checked >= self._clocks.webhook_check or self._current is None
        )
        found = await self._secret() if check else self._current
        if check and self._leading() and not self._provided:
            found = await self._renewed(found)
        if found is not None and self._leading():
            # The API server must trust a certificate before anybody serves it.
            await self._configure(found, check)
        if found is not None and found != self._current:
            self._load(found)
        self._turned = time.monotonic()
        if check:
            self._checked = self._turned

    async def _secret(self) -> Certificate | None:
        secret = await self._api.get(SECRET, self._address.namespace, self._name)
        data = (secret or {}).get("data") or {}
        try:
            texts = [base64.b64decode(data[key]) for key in ("tls.crt", "tls.key", "ca.crt")]
            found = Certificate(*texts)
            _ = found.expires
        except (KeyError, ValueError, binascii.Error):
            return None
        return found

    async def _renewed(self, found: Certificate | None) -> Certificate | None:
        now = self._now()
        if not due(found, self._address.host, now):
            return found
        made = make(self._address.host, now, found)
        data = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.bundle}
        await self._api.apply(
            SECRET,
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": self._name, "namespace": self._address.namespace},
                "data": {key: base64.b64encode(text).decode() for key, text in data.items()},
            },
        )
        log.info("the webhook has a new certificate, which ends %s", made.expires.isoformat())
        return made

    async def _configure(self, found: Certificate, check: bool) -> None:
        policies = self._policies.all()
        wanted = configuration(self._name, policies, self._address, found.bundle)
        if wanted == self._written and not check:
            return
        present = await self._api.get(CONFIGURATION, "", self._name)
        if present is None or not same(wanted, present):
            await self._api.apply(CONFIGURATION, wanted)
            log.info("the webhook is configured for %d policies", len(policies))
        self._written = wanted

    def _load(self, found: Certificate) -> None:
        """Serve new connections with this certificate; open ones go on with theirs."""
        self.certfile.write_bytes(found.certificate)
        self.keyfile.touch(mode=0o600)
        self.keyfile.write_bytes(found.key)
        try:
            self.context.load_cert_chain(self.certfile, self.keyfile)
        except ssl.SSLError as error:
            log.error("Secret %s: certificate and key do not fit: %s", self._name, error)
            return
        self._current = found
        self._served(found.expires.timestamp())
        self.serving.set()
