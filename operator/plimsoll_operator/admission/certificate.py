"""The webhook's own certificate: self-signed, trusted by the API server through the caBundle.

A certificate is replaced while the one before is still valid, and the bundle holds both, so that a
replica that serves the old one is trusted until it has read the new one.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=90)
RENEW_BEFORE = VALID / 3
BACKDATED = datetime.timedelta(minutes=5)
"""For clocks that are behind."""


@dataclass(frozen=True)
class Certificate:
    """A certificate as PEM texts, as a Secret of type ``kubernetes.io/tls`` has them.

    ``bundle`` is what a client trusts.
    """

    certificate: bytes
    key: bytes
    bundle: bytes

    @property
    def expires(self) -> datetime.datetime:
        """When it ends. ValueError where the text is no certificate."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def covers(self, host: str) -> bool:
        """Whether it was made for ``host``."""
        try:
            found = x509.load_pem_x509_certificate(self.certificate)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            return False
        return _general_name(host) in names


def due(current: Certificate | None, host: str, now: datetime.datetime) -> bool:
    """Whether a new certificate is due."""
    if current is None:
        return True
    try:
        return now >= current.expires - RENEW_BEFORE or not current.covers(host)
    except ValueError:
        return True


def make(
    host: str,
    now: datetime.datetime,
    before: Certificate | None = None,
    valid: datetime.timedelta = VALID,
) -> Certificate:
    """Make a certificate for ``host``; the bundle also trusts ``before`` until that has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "plimsoll-webhook")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Certificate(text, private, text + _still_trusted(before, now))


def _still_trusted(before: Certificate | None, now: datetime.datetime) -> bytes:
    """Return the previous certificate if it is valid: no others, so the bundle stays small."""
    try:
        return before.certificate if before is not None and before.expires > now else b""
    except ValueError:
        return b""


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
