"""One CA, one serving certificate, a client certificate for each component, one token key.

As on many clusters, EKS among them, no certificate names a key identifier.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=30)


class Authority:
    """A certificate authority that writes into one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("plimsoll-lab-ca", None)
        certificate = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = self._write("ca", certificate.sign(self._key, hashes.SHA256()), self._key)

    def serving(self, name: str, common_name: str, hosts: list[str]) -> None:
        names: list[x509.GeneralName] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        self._issue(name, _name(common_name, None), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, name: str, common_name: str, group: str | None = None) -> None:
        self._issue(name, _name(common_name, group), ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def service_account_key(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        _private(self.folder / "sa.key", key)
        (self.folder / "sa.pub").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def kubeconfig(self, name: str, server: str, target: Path) -> None:
        """A kubeconfig of client ``name`` with everything inside."""

        def data(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": data("ca.crt")}
        user = {
            "client-certificate-data": data(f"{name}.crt"),
            "client-key-data": data(f"{name}.key"),
        }
        target.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "lab",
                    "clusters": [{"name": "lab", "cluster": cluster}],
                    "users": [{"name": name, "user": user}],
                    "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
                }
            )
        )
        target.chmod(0o600)

    def _issue(
        self,
        name: str,
        subject: x509.Name,
        usage: x509.ObjectIdentifier,
        hosts: list[x509.GeneralName],
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._name, key).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        self._write(name, builder.sign(self._key, hashes.SHA256()), key)

    def _write(
        self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> Path:
        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _private(self.folder / f"{name}.key", key)
        return path


def _private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _name(common_name: str, group: str | None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )
