"""Mutual TLS from one shared secret.

Every process that has the secret derives the same certificate authority from it and signs a certificate for itself.
Nothing else has to be distributed: a launcher hands the secret to the machines of a run, and no other peer is accepted.
"""

import datetime
import hashlib
import ipaddress
import os
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

SECRET = "FORGE_SECRET"  # environment variable: the secret, or the path of a file that holds it
MIN_SECRET = 32  # characters: 128 bits as hexadecimal digits
LIFETIME = datetime.timedelta(days=90)  # of certificates: longer than a run, and a new run makes new ones
SKEW = datetime.timedelta(days=1)  # difference between the clocks of two machines that certificates tolerate
NAME = "forge"  # a host name for which every certificate is valid: peers are identified by the secret


class NoSecret(ValueError):
    """Error: the cluster secret is missing, too short, or readable by other users."""


def read_secret() -> str:
    """Return the cluster secret in the environment variable FORGE_SECRET.

    If the variable is a path that starts with /, ./ or ~, the secret is the content of that file.

    Raises:
        NoSecret: the variable is not set, the file is missing or readable by other users, or the secret is too short.
    """
    if not (secret := os.environ.get(SECRET)):
        raise NoSecret(
            f"{SECRET} is not set: create a secret with `openssl rand -hex 32`, and set it for the workers and the "
            "controller. Anyone who knows it can run programs on the hosts"
        )

    # A secret of hexadecimal digits does not start like a path.
    if secret.startswith(("/", "./", "~")):
        path = Path(secret).expanduser()
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise NoSecret(f"{path} has the cluster secret, but other users can read it: chmod 600 {path}")
            secret = path.read_text().strip()
        except OSError as error:
            raise NoSecret(f"{SECRET} names a file that could not be read: {path}: {error.strerror}") from None

    # A short secret could be guessed, and it is all that protects a port by which programs are started.
    if len(secret) < MIN_SECRET:
        raise NoSecret(
            f"the secret has {len(secret)} characters, but at least {MIN_SECRET} are needed: create one with `openssl "
            "rand -hex 32`"
        )

    return secret


def check_certificates() -> None:
    """Check that the package cryptography is installed. ImportError: it is not."""
    if find_spec("cryptography") is None:
        raise ImportError("runs on several machines need certificates: pip install cryptography")


@dataclass(frozen=True)
class Credentials:
    """TLS files of one process: the certificate of the authority, its own certificate, and its private key."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def make(
        cls, secret: str, folder: Path, addresses: Iterable[str] = (), lifetime: datetime.timedelta = LIFETIME
    ) -> "Credentials":
        """Write new credentials for a process into a folder, readable by this user only.

        Args:
            secret: of the run, which determines the authority.
            addresses: host names and IP addresses of this process, for which its certificate is valid.
            lifetime: of its certificate.

        Raises:
            ImportError: the package cryptography is not installed.
        """
        check_certificates()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        # The private key of the authority is the same in every process that has the secret. scrypt makes guessing a
        # short secret slow. Any number from 1 to the order of the curve is a private key.
        order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
        derived = hashlib.scrypt(secret.encode(), salt=b"torchforge cluster", n=2**14, r=8, p=1, dklen=48)
        authority = ec.derive_private_key(int.from_bytes(derived) % (order - 1) + 1, ec.SECP256R1())
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forge run")])

        # The certificate of the authority: each process derives the same key, and signs a new one by it.
        signs_only = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        root = _start_certificate(
            authority, issuer, issuer, authority.public_key(), LIFETIME, is_ca=True
        ).add_extension(signs_only, critical=True)

        # The certificate of the process. All processes have one name in common, by which their peers check it.
        names: list[x509.GeneralName] = [x509.DNSName(NAME), x509.DNSName("localhost")]
        for address in addresses:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(address)))
            except ValueError:
                names.append(x509.DNSName(address))

        key = ec.generate_private_key(authority.curve)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        leaf = (
            _start_certificate(authority, issuer, subject, key.public_key(), lifetime, is_ca=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(both_ends, critical=False)
        )

        # Readable by this user only: with the key a process proves that it belongs to the run.
        credentials = cls(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
        pem = serialization.Encoding.PEM
        unencrypted = serialization.NoEncryption()
        for path, text in {
            credentials.ca: root.sign(authority, hashes.SHA256()).public_bytes(pem),
            credentials.certificate: leaf.sign(authority, hashes.SHA256()).public_bytes(pem),
            credentials.key: key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted),
        }.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)

        return credentials

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables by which Monarch's `tls://` transport finds the files."""
        return {
            "HYPERACTOR_TLS_CA": str(self.ca),
            "HYPERACTOR_TLS_CERT": str(self.certificate),
            "HYPERACTOR_TLS_KEY": str(self.key),
        }

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return a TLS 1.3 context, of a server or client, that accepts only peers certified by the same authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.certificate, self.key)
        return context


def _start_certificate(
    authority: "ec.EllipticCurvePrivateKey",
    issuer: "x509.Name",
    subject: "x509.Name",
    public_key: "ec.EllipticCurvePublicKey",
    lifetime: datetime.timedelta,
    *,
    is_ca: bool,
) -> "x509.CertificateBuilder":
    """Return an unsigned certificate with the fields that those of the authority and of processes have in common."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(identifier, critical=False)
    )
