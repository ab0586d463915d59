"""Issue the webhook's certificates: a long-lived CA, and a short-lived leaf for each replica.

The private key of a leaf never leaves its replica. ``caBundle`` contains only the CA, so a new leaf
does not change it.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_CERTIFICATE_LIFETIME = datetime.timedelta(days=3 * 365)
SERVER_CERTIFICATE_LIFETIME = datetime.timedelta(days=30)
CLOCK_SKEW = datetime.timedelta(minutes=5)
"""Age of a new certificate's ``notBefore``, so that clients with slow clocks accept it."""


@dataclass(frozen=True)
class Certificate:
    """PEM-encoded certificate and key; ``bundle`` is the CA bundle that clients trust."""

    certificate: bytes
    key: bytes
    bundle: bytes

    @property
    def expires_at(self) -> datetime.datetime:
        """Time at which the certificate expires. Raises ValueError if its PEM text is malformed."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def is_valid_for(self, host: str) -> bool:
        """Report whether the certificate is valid for ``host``."""
        try:
            parsed = x509.load_pem_x509_certificate(self.certificate)
            names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            return False
        return _make_general_name(host) in names


def needs_renewal(
    current: Certificate | None, now: datetime.datetime, lifetime: datetime.timedelta
) -> bool:
    """Report whether ``current`` is missing, malformed or in the last third of its ``lifetime``."""
    try:
        return current is None or now >= current.expires_at - lifetime / 3
    except ValueError:
        return True


def create_ca_certificate(
    now: datetime.datetime, lifetime: datetime.timedelta = CA_CERTIFICATE_LIFETIME
) -> Certificate:
    """Create a self-signed CA certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _make_common_name(f"plimsoll-webhook-ca-{now:%Y%m%d%H%M%S}")
    ends = x509.BasicConstraints(ca=True, path_length=0)
    cert = (
        _make_certificate_builder(
            name, name, key.public_key(), key.public_key(), now, now + lifetime
        )
        .add_extension(ends, critical=True)
        .sign(key, hashes.SHA256())
    )
    text = cert.public_bytes(serialization.Encoding.PEM)
    return Certificate(text, _encode_private_key(key), text)


def create_server_certificate(
    host: str,
    signer: Certificate,
    now: datetime.datetime,
    lifetime: datetime.timedelta = SERVER_CERTIFICATE_LIFETIME,
) -> Certificate:
    """Create a server certificate for ``host``. It expires no later than the signer's.

    Raises ValueError if ``signer`` has no valid certificate or private key.
    """
    issuer = x509.load_pem_x509_certificate(signer.certificate)
    signing = serialization.load_pem_private_key(signer.key, None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise ValueError(
            "the private key of the CA is not an elliptic-curve key: delete the Secret, so "
            "that the leader creates a CA"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + lifetime, issuer.not_valid_after_utc)
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    cert = (
        _make_certificate_builder(
            _make_common_name("plimsoll-webhook"), issuer.subject, key.public_key(),
            signing.public_key(), now, ends,
        )
        .add_extension(x509.SubjectAlternativeName([_make_general_name(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(purpose, critical=False)
        .sign(signing, hashes.SHA256())
    )  # fmt: skip
    return Certificate(
        cert.public_bytes(serialization.Encoding.PEM), _encode_private_key(key), signer.bundle
    )


def is_ca_certificate(certificate: Certificate) -> bool:
    """Report whether ``certificate`` is a CA certificate with the matching private key."""
    try:
        cert = x509.load_pem_x509_certificate(certificate.certificate)
        key = serialization.load_pem_private_key(certificate.key, None)
        ends = cert.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False
    is_pair = isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == cert.public_key()
    return is_pair and ends.ca


def split_bundle(bundle: bytes) -> list[bytes]:
    """Return the PEM texts of the certificates in a bundle; empty if the bundle is malformed."""
    try:
        certs = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []
    return [cert.public_bytes(serialization.Encoding.PEM) for cert in certs]


def _make_certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _make_common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _make_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
