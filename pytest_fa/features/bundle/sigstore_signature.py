"""Check a Sigstore signature of a bundle, as `gh attestation` and cosign write it, without a network.

The signature is an attestation: a signed in-toto statement whose subject is the archive.  It says who made the bundle,
never that its figures were measured.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_fa.errors import FaError, UsageProblem
from pytest_fa.features.bundle.attest import PREDICATE, CannotAttest, attest_bundle
from pytest_fa.records.text import printable
from pytest_fa.regular_file import open_regular

if TYPE_CHECKING:
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import VerificationPolicy

GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
LARGEST_BYTES = 16 * 2**20
MOST_ATTESTATIONS = 100
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class BadSignature(FaError):
    """A signature that does not hold, or is not of this bundle or this signer."""


class SignatureClaim(msgspec.Struct, frozen=True):
    """A signature file and who must have signed.

    `signer` is a GitHub repository (`OWNER/NAME`), or the identity in the certificate, which needs an `issuer`.
    `trusted_root` is a file of Sigstore's keys; None is the public instance.
    """

    file: Path
    signer: str
    issuer: str | None = None
    trusted_root: Path | None = None


def check_signature(path: Path, claim: SignatureClaim) -> str:
    """Return who signed the bundle at `path`.

    Raises `BadSignature` if no attestation of the file is a valid signature of this archive by the expected signer, and
    `UsageProblem` if sigstore is not installed, or the claim lacks an issuer.
    """
    policy, verifiers = _policy(claim), _verifiers(claim)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    problems = []
    for attestation in _attestations(claim.file):
        for verifier in verifiers:
            try:
                statement, identity = _signed_statement(attestation, verifier, policy)
                _require_subject(statement, sha256)
                _require_predicate(statement, path)
            except BadSignature as problem:
                problems.append(str(problem))
            else:
                return identity
    raise BadSignature(printable(problems[0] if problems else f"{claim.file.name} contains no attestation"))


def _policy(claim: SignatureClaim) -> VerificationPolicy:
    try:
        from sigstore.verify import policy  # noqa: PLC0415  # from the extra `signature`
    except ImportError:
        raise UsageProblem("--signature needs sigstore: pip install 'pytest-fa[signature]'") from None
    if _REPOSITORY.fullmatch(claim.signer):
        repository = policy.OIDCSourceRepositoryURI(f"https://github.com/{claim.signer}")
        return policy.AllOf([repository, policy.OIDCIssuerV2(claim.issuer or GITHUB_ISSUER)])
    if claim.issuer is None:
        raise UsageProblem(
            f"--signer: {claim.signer!r} is no GitHub repository (OWNER/NAME), so it needs --issuer: who vouches for "
            f"it, such as {GITHUB_ISSUER}"
        )
    return policy.Identity(identity=claim.signer, issuer=claim.issuer)


def _verifiers(claim: SignatureClaim) -> list[Verifier]:
    """One verifier for each set of trusted keys; `gh attestation trusted-root` writes one on each line."""
    from sigstore.errors import Error  # noqa: PLC0415
    from sigstore.models import TrustedRoot  # noqa: PLC0415
    from sigstore.verify import Verifier  # noqa: PLC0415

    if claim.trusted_root is None:
        return [Verifier.production(offline=True)]
    verifiers = []
    with tempfile.TemporaryDirectory(prefix="fa-root-") as folder:
        for number, line in enumerate(_documents(claim.trusted_root)):
            file = Path(folder) / f"{number}.json"
            file.write_text(line, encoding="utf-8")
            try:
                verifiers.append(Verifier(trusted_root=TrustedRoot.from_file(str(file))))
            except (Error, ValueError) as problem:
                raise UsageProblem(printable(f"--trusted-root: {claim.trusted_root}: {problem}")) from None
    return verifiers


def _attestations(file: Path) -> list[SigstoreBundle]:
    from sigstore.errors import Error  # noqa: PLC0415
    from sigstore.models import Bundle as SigstoreBundle  # noqa: PLC0415

    try:
        return [SigstoreBundle.from_json(line) for line in _documents(file)[:MOST_ATTESTATIONS]]
    except (Error, ValueError, RecursionError) as problem:
        raise BadSignature(printable(f"{file.name} is no Sigstore bundle: {_sentence(problem)}")) from None


def _documents(file: Path) -> list[str]:
    """The JSON documents of a file that is one document, or has one on each line."""
    with open_regular(file) as stream:
        content = stream.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise BadSignature(f"{file.name} is larger than {LARGEST_BYTES // 2**20} MiB")
    text = content.decode("utf-8", "replace")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return [line for line in text.splitlines() if line.strip()]
    return [text]


def _signed_statement(
    attestation: SigstoreBundle, verifier: Verifier, policy: VerificationPolicy
) -> tuple[dict[str, Any], str]:
    """The statement that was signed, and the identity of the signer."""
    from sigstore.errors import Error  # noqa: PLC0415

    try:
        payload_type, payload = verifier.verify_dsse(attestation, policy)
        statement = json.loads(payload)
    except (Error, ValueError, RecursionError) as problem:
        raise BadSignature(f"the signature does not hold: {_sentence(problem)}") from None
    if payload_type != PAYLOAD_TYPE or not isinstance(statement, dict):
        raise BadSignature(f"the signature is of {payload_type}, not of an in-toto statement")
    return statement, _identity(attestation)


def _identity(attestation: SigstoreBundle) -> str:
    """The names in the certificate: the workflow, or the mail address."""
    from cryptography.x509 import SubjectAlternativeName  # noqa: PLC0415  # sigstore needs it

    names = attestation.signing_certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    return printable(", ".join(str(name.value) for name in names))


def _require_subject(statement: dict[str, Any], sha256: str) -> None:
    subjects = statement.get("subject")
    digests = [each.get("digest") for each in subjects if isinstance(each, dict)] if isinstance(subjects, list) else []
    if not any(isinstance(digest, dict) and digest.get("sha256") == sha256 for digest in digests):
        raise BadSignature("the signature is of another file: no subject has the sha256 of this archive")


def _require_predicate(statement: dict[str, Any], path: Path) -> None:
    """Require that a statement about test results says what the bundle says; a provenance says nothing about it."""
    if statement.get("predicateType") != PREDICATE:
        return
    try:
        expected = json.loads(attest_bundle(path))["predicate"]
    except CannotAttest:
        return  # the bundle is broken, and the verification says why
    if statement.get("predicate") != expected:
        raise BadSignature("the signed test results are not those of the bundle")


def _sentence(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300] or type(problem).__name__
