"""A Sigstore of its own for tests: a certificate authority, a certificate log, a transparency log, and signatures."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import struct
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

SIGNED_AT = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
SCT_LIST = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
ISSUER_V1, ISSUER, REPOSITORY = (ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{number}") for number in (1, 8, 12))
HOUR = dt.timedelta(hours=1)


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    content: bytes = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return content


def _sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    signature: bytes = key.sign(content, ec.ECDSA(hashes.SHA256()))
    return signature


def _der(tag: int, content: bytes) -> bytes:
    """One DER value of up to 65,535 bytes."""
    size = len(content)
    length = bytes([size]) if size < 128 else b"\x81" + bytes([size]) if size < 256 else b"\x82" + size.to_bytes(2)
    return bytes([tag]) + length + content


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Sigstore:
    """Signs statements as the public instance does, with keys that are made anew."""

    def __init__(self) -> None:
        self._ca, self._ct, self._rekor = _key(), _key(), _key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's authority")])
        usage = {field: field == "key_cert_sign" for field in _USAGES}
        self._root = (
            self._certificate(name, self._ca, days=3650)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._ca.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.public_key()), critical=False)
            .sign(self._ca, hashes.SHA256())
        )

    def trusted_root(self) -> bytes:
        """The keys of this Sigstore, as `--trusted-root` reads them."""
        start = (SIGNED_AT - 100 * HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [_log("https://rekor.example.org", self._rekor, start)],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "a test", "commonName": "a test's authority"},
                    "uri": "https://fulcio.example.org",
                    "certChain": {"certificates": [{"rawBytes": _b64(self._root.public_bytes(Encoding.DER))}]},
                    "validFor": {"start": start},
                }
            ],
            "ctlogs": [_log("https://ct.example.org", self._ct, start)],
            "timestampAuthorities": [],
        }
        return json.dumps(root).encode()

    def attestation(self, statement: bytes, repository: str, identity: str, issuer: str) -> dict[str, Any]:
        """A Sigstore bundle with the signed statement, as `gh attestation download` writes one."""
        key = _key()
        certificate = self._signer_certificate(key, repository, identity, issuer)
        kind = b"application/vnd.in-toto+json"
        signature = _sign(key, b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement))
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._log_entry(certificate, statement, signature)],
            },
            "dsseEnvelope": {
                "payload": _b64(statement),
                "payloadType": kind.decode(),
                "signatures": [{"sig": _b64(signature)}],
            },
        }

    def _certificate(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> Any:
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's authority")])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(SIGNED_AT - HOUR)
            .not_valid_after(SIGNED_AT + dt.timedelta(days=days))
        )

    def _signer_certificate(
        self, key: ec.EllipticCurvePrivateKey, repository: str, identity: str, issuer: str
    ) -> x509.Certificate:
        """A certificate for ten minutes, which the certificate log has signed."""
        usage = {field: field == "digital_signature" for field in _USAGES}
        plain = (
            self._certificate(x509.Name([]), key, days=1 / 144)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(ISSUER_V1, issuer.encode()), critical=False)
            .add_extension(x509.UnrecognizedExtension(ISSUER, _der(12, issuer.encode())), critical=False)
            .add_extension(
                x509.UnrecognizedExtension(REPOSITORY, _der(12, f"https://github.com/{repository}".encode())),
                critical=False,
            )
        )
        unsigned = self._with_timestamp(plain, b"")
        return self._with_timestamp(plain, unsigned.tbs_precertificate_bytes)

    def _with_timestamp(self, plain: Any, body: bytes) -> x509.Certificate:
        """The certificate with the log's signature of its body, which does not contain that signature."""
        time_ms, issuer_key = int(SIGNED_AT.timestamp() * 1000), hashlib.sha256(_public(self._ca)).digest()
        entry = issuer_key + len(body).to_bytes(3) + body
        signature = _sign(self._ct, struct.pack("!BBQH", 0, 0, time_ms, 1) + entry + b"\0\0")
        log = hashlib.sha256(_public(self._ct)).digest()
        timestamp = b"\0" + log + struct.pack("!QHBBH", time_ms, 0, 4, 3, len(signature)) + signature
        listed = len(timestamp).to_bytes(2) + timestamp
        value = _der(4, len(listed).to_bytes(2) + listed)
        signed: x509.Certificate = plain.add_extension(
            x509.UnrecognizedExtension(SCT_LIST, value), critical=False
        ).sign(self._ca, hashes.SHA256())
        return signed

    def _log_entry(self, certificate: x509.Certificate, statement: bytes, signature: bytes) -> dict[str, Any]:
        """The only entry of the transparency log: its promise, and the proof that it is in the log."""
        verifier = _b64(certificate.public_bytes(Encoding.PEM))
        payload_hash = {"algorithm": "sha256", "value": hashlib.sha256(statement).hexdigest()}
        body = _canonical(
            {
                "apiVersion": "0.0.1",
                "kind": "dsse",
                "spec": {
                    "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                    "payloadHash": payload_hash,
                    "signatures": [{"signature": _b64(signature), "verifier": verifier}],
                },
            }
        )
        log, time_s = hashlib.sha256(_public(self._rekor)).digest(), int(SIGNED_AT.timestamp())
        promise = {"body": _b64(body), "integratedTime": time_s, "logID": log.hex(), "logIndex": 0}
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"rekor.example.org - 1\n1\n{_b64(root)}\n"
        checkpoint = f"{note}\n\u2014 rekor.example.org {_b64(log[:4] + _sign(self._rekor, note.encode()))}\n"
        return {
            "logIndex": "0",
            "logId": {"keyId": _b64(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(time_s),
            "inclusionPromise": {"signedEntryTimestamp": _b64(_sign(self._rekor, _canonical(promise)))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": _b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": checkpoint},
            },
            "canonicalizedBody": _b64(body),
        }


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _log(url: str, key: ec.EllipticCurvePrivateKey, start: str) -> dict[str, Any]:
    public = {"rawBytes": _b64(_public(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": {"start": start}}
    log_id = _b64(hashlib.sha256(_public(key)).digest())
    return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": {"keyId": log_id}}
