"""TLS between peers, if the broker has it: each process has a certificate, whose fingerprint is in the broker.

The certificate is self-signed and created at each start; its private key never leaves the process. Readers accept only
the certificate whose fingerprint the broker names, so no authority is needed.
"""

import datetime
import hashlib
import hmac
import os
import socket
import ssl
import tempfile
from pathlib import Path

from broker.weights.peers.wire import PeerError
from schemas.errors import ConfigError

VALID = datetime.timedelta(days=3650)
"""Validity of a certificate, which does not matter: the record in the broker counts, and its lease is short."""


def has_tls(url: str) -> bool:
    """Return whether a broker's URL asks for TLS; peers then use it, too."""
    return url.startswith("rediss:")


def make_certificate() -> tuple[ssl.SSLContext, str]:
    """Return a server context with a new certificate, and its fingerprint; ConfigError without ``cryptography``."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            "trainer.publish.transport peer beside a broker with TLS needs the package cryptography:"
            f" pip install 'tidemill[tls]': {error}"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tidemill peer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + VALID)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    password = os.urandom(32)
    with tempfile.TemporaryDirectory(prefix="tidemill-") as folder:
        # ssl reads files only; this one is encrypted, in a private folder, and deleted at once.
        file = Path(folder) / "pem"
        file.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password),
            )
        )
        context.load_cert_chain(file, password=password)
    return context, _fingerprint(certificate.public_bytes(serialization.Encoding.DER))


def secure(stream: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """Wrap a reader's connection in TLS; PeerError unless the server's certificate has this fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The fingerprint identifies the peer.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    secured = context.wrap_socket(stream)
    if not hmac.compare_digest(_fingerprint(secured.getpeercert(binary_form=True) or b""), fingerprint):
        secured.close()
        raise PeerError("its certificate is not the one that the broker names")
    return secured


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()
