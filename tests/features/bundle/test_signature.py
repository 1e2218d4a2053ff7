"""Signatures of bundles: valid ones name the signer, and every part that does not fit is refused."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.features.bundle.attest import attest_bundle
from pytest_fa.features.bundle.commands import main
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.sigstore_signature import GITHUB_ISSUER
from pytest_fa.records.environment import read_environment
from pytest_fa.records.source import read_source
from tests.factories import right_record

pytest.importorskip("sigstore")
from tests.features.bundle.signing import Sigstore
from tests.written_runs import end_run

REPOSITORY = "owner/name"
IDENTITY = "https://github.com/owner/name/.github/workflows/ci.yml@refs/heads/main"


class Signed(msgspec.Struct, frozen=True):
    """A bundle, the Sigstore that signs it, the file of its keys, and the folder for signatures."""

    archive: Path
    sigstore: Sigstore
    root: Path

    def verify(self, attestation: Any, *words: str, signer: str = REPOSITORY) -> int:
        """The exit status of `verify` with this signature file content, or with this attestation."""
        file = self.archive.with_name("signature.json")
        file.write_text(attestation if isinstance(attestation, str) else json.dumps(attestation), encoding="utf-8")
        fixed = ["verify", str(self.archive), f"--signature={file}", f"--trusted-root={self.root}"]
        return main([*fixed, f"--signer={signer}", *words])

    def attestation(self, **changes: Any) -> dict[str, Any]:
        """A valid attestation; `changes` replace parts of the statement, or the signer."""
        statement = json.loads(attest_bundle(self.archive))
        names = {"repository": REPOSITORY, "identity": IDENTITY, "issuer": GITHUB_ISSUER}
        signer = {name: changes.pop(name, default) for name, default in names.items()}
        return self.sigstore.attestation(json.dumps({**statement, **changes}).encode(), **signer)


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    """Return a verified bundle, and a Sigstore of its own."""
    records = tmp_path / "tree/artifacts/records/run.jsonl"
    records.parent.mkdir(parents=True)
    read_source.cache_clear()
    line = right_record(environment=read_environment(), source=read_source(tmp_path / "tree"))
    records.write_bytes(msgspec.json.encode(line) + b"\n")
    bundle = make_bundle(tmp_path / "tree", tmp_path / "tree/artifacts", end_run(records, 0), 0)
    sigstore, root = Sigstore(), tmp_path / "root.json"
    root.write_bytes(sigstore.trusted_root())
    return Signed(bundle.archive, sigstore, root)


def test_a_valid_signature_names_the_signer(signed: Signed, capsys: pytest.CaptureFixture[str]) -> None:
    """A signature by the expected repository is valid; the output has the workflow that signed."""
    assert signed.verify(signed.attestation()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"signature: signed by {IDENTITY}" in lines
    assert lines[-1].startswith("VERIFIED ")


def test_an_identity_needs_its_issuer(signed: Signed, capsys: pytest.CaptureFixture[str]) -> None:
    """A signer that is no repository is compared with the certificate's identity, and needs an issuer."""
    assert signed.verify(signed.attestation(), f"--issuer={GITHUB_ISSUER}", signer=IDENTITY) == 0
    assert signed.verify(signed.attestation(), signer=IDENTITY) == 2
    assert "so it needs --issuer" in capsys.readouterr().err


def test_one_of_several_attestations_is_enough(signed: Signed) -> None:
    """Of a file with an attestation on each line, as `gh attestation download` writes it, one must be valid."""
    other = signed.attestation(subject=[{"name": "x", "digest": {"sha256": "0" * 64}}])
    lines = [json.dumps(each) for each in (other, signed.attestation())]
    assert signed.verify("\n".join(lines) + "\n") == 0


def test_a_provenance_says_nothing_about_results(signed: Signed) -> None:
    """A statement with another predicate is a signature of the archive."""
    assert signed.verify(signed.attestation(predicateType="https://slsa.dev/provenance/v1", predicate={})) == 0


REFUSED: dict[str, tuple[Callable[[Signed], Any], str]] = {
    "another repository": (lambda signed: signed.attestation(repository="owner/other"), "does not hold"),
    "another issuer": (lambda signed: signed.attestation(issuer="https://example.org"), "does not hold"),
    "another file": (
        lambda signed: signed.attestation(subject=[{"name": "x", "digest": {"sha256": "0" * 64}}]),
        "the signature is of another file",
    ),
    "no subject": (lambda signed: signed.attestation(subject="x"), "the signature is of another file"),
    "other results": (
        lambda signed: signed.attestation(predicate={"result": "PASSED"}),
        "the signed test results are not those of the bundle",
    ),
    "another statement": (lambda signed: changed(signed, "payload"), "does not hold"),
    "another certificate authority": (lambda _: _foreign(), "does not hold"),
    "no log entry": (lambda signed: changed(signed, "tlogEntries"), "is no Sigstore bundle"),
    "an entry that is not in the log": (lambda signed: changed(signed, "rootHash"), "does not hold"),
    "an entry without the log's promise": (lambda signed: changed(signed, "signedEntryTimestamp"), "does not hold"),
    "no JSON": (lambda _: "no JSON", "is no Sigstore bundle"),
    "an empty file": (lambda _: "", "contains no attestation"),
    "nested brackets": (lambda _: "[" * 100_000, "is no Sigstore bundle"),
}


def changed(signed: Signed, part: str) -> dict[str, Any]:
    """A valid attestation in which one part was changed after signing."""
    attestation = signed.attestation()
    material = attestation["verificationMaterial"]
    entry = material["tlogEntries"][0]
    if part == "payload":
        statement = json.loads(base64.b64decode(attestation["dsseEnvelope"]["payload"]))
        content = json.dumps({**statement, "predicate": {}}).encode()
        attestation["dsseEnvelope"]["payload"] = base64.b64encode(content).decode()
    elif part == "tlogEntries":
        material["tlogEntries"] = []
    elif part == "rootHash":
        entry["inclusionProof"]["rootHash"] = base64.b64encode(bytes(32)).decode()
    else:
        entry["inclusionPromise"]["signedEntryTimestamp"] = entry["logId"]["keyId"]
    return attestation


def _foreign() -> dict[str, Any]:
    """An attestation by another Sigstore, for the right names."""
    return Sigstore().attestation(b"{}", REPOSITORY, IDENTITY, GITHUB_ISSUER)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(signed: Signed, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Each part of a signature that does not fit breaks the bundle, with one sentence."""
    make, sentence = REFUSED[case]
    assert signed.verify(make(signed)) == 1
    lines = capsys.readouterr().out.splitlines()
    (problem,) = [line for line in lines if line.startswith("signature: ") and line != "signature: not valid"]
    assert sentence in problem
    assert lines[-1].startswith("BROKEN ")


def test_the_public_instance_does_not_know_a_tests_authority(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --trusted-root, the keys are those of the public Sigstore, read without a network."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    connections: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connections.append(address))
    file = tmp_path / "signature.json"
    file.write_text(json.dumps(signed.attestation()), encoding="utf-8")
    words = ["verify", str(signed.archive), f"--signature={file}", f"--signer={REPOSITORY}"]
    assert (main(words), connections) == (1, [])


@pytest.mark.parametrize("words", [["--signer=owner/name"], ["--signature=x.json"], ["--trusted-root=x.json"]])
def test_options_that_need_another(signed: Signed, words: list[str]) -> None:
    """A signer without a signature, and a signature without a signer, are usage errors."""
    assert main(["verify", str(signed.archive), *words]) == 2
