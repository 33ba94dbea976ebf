"""Signatures: the reference implementation verifies ours, ours verifies the reference's, and no
other is accepted.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix import (
    KeySigning,
    OperationError,
    Policy,
    SigstoreSigning,
    Trust,
    UsageError,
    VerifyReport,
    migrate,
    repair,
    seal,
    verify,
)
from ckptfix.cli import run
from ckptfix.storage.paths import SIGNED
from ckptfix.verification.verify_report import Outcome
from tests.verification.sealed import KINDS, flip, place, wrong

EXTRA = "needs the extra: pip install 'ckptfix[signing]'"
model_signing = pytest.importorskip("model_signing", reason=EXTRA)

from cryptography import x509  # noqa: E402 - of the extra
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

FILES, TENSORS = SIGNED
pytestmark = pytest.mark.slow
"""Importing the reference implementation takes more than a second."""


class Keys:
    """A pair of keys in files."""

    def __init__(
        self, folder: Path, name: str, *, curve: Any = None, passphrase: bytes | None = None
    ) -> None:
        self.key = ec.generate_private_key(curve or ec.SECP256R1())
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub"
        locked = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        form = serialization.PrivateFormat.PKCS8
        self.private.write_bytes(self.key.private_bytes(serialization.Encoding.PEM, form, locked))
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public.write_bytes(
            self.key.public_key().public_bytes(serialization.Encoding.PEM, kind)
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, "key")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS[request.param](folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "config-a.json").write_text("{}")
    (folder / "sub-b").write_text("sorted before sub/ as text, and after it as a path")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    return folder


def trusted(folder: Path, keys: Keys, *names: str) -> VerifyReport:
    paths = [folder / name for name in names or SIGNED]
    return verify(folder, signatures=paths, trust=Trust(key=keys.public))


def reference(folder: Path, signature: Path, public: Path) -> None:
    """Verify as ``model_signing verify key`` does. Raises ValueError for any difference."""
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[signature])
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public)
    config.set_hashing_config(hashing).verify(folder, signature)


def test_the_reference_verifies_what_is_signed_here(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    receipt = seal(folder, sign=KeySigning(keys.private))
    assert receipt.statements == SIGNED
    assert "signed by the key sha256:" in str(receipt)
    reference(folder, folder / FILES, keys.public)
    guessing = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
    guessing.verify(folder, folder / FILES)  # with the hashing that the statement asks for
    outside = tmp_path / "elsewhere.sig"
    outside.write_bytes((folder / FILES).read_bytes())
    reference(folder, outside, keys.public)
    report = trusted(folder, keys)
    assert report.status == 0
    assert all(one.is_verified for one in report.statements)
    assert verify(folder).status == 0, "the manifest lists the signatures"
    assert seal(folder, sign=KeySigning(keys.private)).status == 0, "signed once more"
    reference(folder, folder / FILES, keys.public)

    flip(folder / "sub-b", 3)
    with pytest.raises(ValueError, match=r"Hash mismatch for .*sub-b"):
        reference(folder, folder / FILES, keys.public)
    report = trusted(folder, keys)
    assert report.status == 1
    assert wrong(report)["sub-b"][0] == "changed"


def ours_and_reference(
    folder: Path, keys: Keys, theirs: Path, *, shard_size: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the statement that is there and the reference's own, once both are known to be
    serialized alike.
    """
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[".ckptfix", *SIGNED])
    if shard_size is not None:
        hashing.use_shard_serialization(shard_size=shard_size)
    signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    signing.set_hashing_config(hashing).sign(folder, theirs)
    ours, other = (
        json.loads(base64.b64decode(json.loads(path.read_text())["dsseEnvelope"]["payload"]))
        for path in (folder / FILES, theirs)
    )
    how, their_how = ours["predicate"]["serialization"], other["predicate"]["serialization"]
    assert set(their_how.pop("ignore_paths")) < set(how.pop("ignore_paths"))
    assert how == their_how
    return ours, other


def test_the_statement_is_the_one_of_the_reference(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    """Resource by resource, in its order, with its subject: whatever refers to a model by its
    subject finds both.
    """
    seal(folder, sign=KeySigning(keys.private))
    ours, other = ours_and_reference(folder, keys, tmp_path / "reference.sig")
    assert ours["predicate"]["resources"] == other["predicate"]["resources"]
    assert len(ours["predicate"]["resources"]) >= 3
    for key in ("_type", "subject", "predicateType"):
        assert ours[key] == other[key]


def test_the_reference_verifies_ranges_and_has_the_same_statement_of_them(
    folder: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.verification.seal.RANGE", 1000)
    (folder / "empty").touch()
    seal(folder, ranges=True, sign=KeySigning(keys.private))
    verifying = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
    verifying.verify(folder, folder / FILES)  # with the shards that the statement asks for
    assert trusted(folder, keys).status == 0
    ours, other = ours_and_reference(folder, keys, tmp_path / "reference.sig", shard_size=1000)
    assert ours["predicate"]["resources"] == other["predicate"]["resources"]
    assert len(ours["predicate"]["resources"]) > 4
    assert ours["subject"] == other["subject"]
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt")]
    largest = max(weights, key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size - 1)
    verifying = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
    with pytest.raises(ValueError, match="Hash mismatch for"):
        verifying.verify(folder, folder / FILES)
    assert trusted(folder, keys).status == 1


def test_the_reference_refuses_an_added_file_as_we_do(folder: Path, keys: Keys) -> None:
    seal(folder, sign=KeySigning(keys.private))
    (folder / "sub" / "added.py").write_text("")
    with pytest.raises(ValueError, match="Extra files found"):
        reference(folder, folder / FILES, keys.public)
    report = trusted(folder, keys, FILES)
    assert report.status == 1
    assert wrong(report)["sub/added.py"][0] == "extra"


@pytest.mark.parametrize("serialization", ["files", "shards"])
@pytest.mark.parametrize("algorithm", ["sha256", "blake2", "blake3"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_what_the_reference_signed_is_verified_here(
    tmp_path: Path, keys: Keys, serialization: str, algorithm: str, where: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["sharded"](folder)
    (folder / "name:with:colons" if serialization == "files" else folder / "plain").write_text("x")
    signature = (folder if where == "inside" else tmp_path) / "reference.sig"
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=["reference.sig"])
    if serialization == "files":
        hashing.use_file_serialization(hashing_algorithm=algorithm)
    else:
        hashing.use_shard_serialization(hashing_algorithm=algorithm, shard_size=1000)
    signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    signing.set_hashing_config(hashing).sign(folder, signature)
    trust = Trust(key=keys.public)
    report = verify(folder, signatures=[signature], trust=trust)
    assert report.status == 0, str(report)
    assert sum(item.outcome is Outcome.MATCH for item in report.items) == 4
    for path in sorted(one for one in folder.iterdir() if one != signature):
        for at in range(0, path.stat().st_size, 701):
            flip(path, at)
            report = verify(folder, signatures=[signature], trust=trust)
            assert report.status == 1, (path, at)
            assert wrong(report)[path.name][0] == "changed"
            flip(path, at)
    path.rename(path.with_name("another name"))
    assert verify(folder, signatures=[signature], trust=trust).status == 1


@pytest.mark.parametrize(
    "curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name
)
def test_every_curve_of_the_reference(tmp_path: Path, curve: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    keys = Keys(tmp_path, "key", curve=curve)
    seal(folder, sign=KeySigning(keys.private))
    reference(folder, folder / FILES, keys.public)
    assert trusted(folder, keys).status == 0


def test_another_key_is_unknown_and_nothing_is_compared(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    seal(folder, sign=KeySigning(keys.private))
    other = Keys(tmp_path, "other")
    report = trusted(folder, other)
    assert report.status == 1, "a signature by someone else is a difference, not an omission"
    assert not report.items
    assert not report.is_verified
    assert "is signed with another key, sha256:" in str(report)
    assert f"(expected {other.public}, sha256:" in str(report)
    report = verify(folder, statements=[folder / FILES])
    assert report.status == 0
    assert "signature by the key sha256:" in str(report)
    assert " not verified: anyone could have written it" in str(report)
    assert not report.statements[0].is_verified


def test_a_folder_without_a_manifest_names_the_signature_in_it(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    (folder / ".ckptfix" / "manifest.json").unlink()
    next_step = f"next: ckptfix verify --signature {folder / FILES} --key PUBLIC_KEY {folder}"
    assert next_step in str(verify(folder))


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    bundle = json.loads(path.read_text())
    change(bundle)
    path.write_text(json.dumps(bundle))


def with_payload(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def apply(bundle: dict[str, Any]) -> None:
        envelope = bundle["dsseEnvelope"]
        payload = json.loads(base64.b64decode(envelope["payload"]))
        change(payload)
        envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()

    return apply


def without_hint(bundle: dict[str, Any]) -> None:
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    flipped_signature(bundle)


def flipped_signature(bundle: dict[str, Any]) -> None:
    (one,) = bundle["dsseEnvelope"]["signatures"]
    data = bytearray(base64.b64decode(one["sig"]))
    data[-1] ^= 1
    one["sig"] = base64.b64encode(data).decode()


FORGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another statement": (
        with_payload(lambda payload: payload["subject"][0].update(name="x")),
        "does not match",
    ),
    "another signature": (flipped_signature, "or was changed after it was signed"),
    "no signature": (
        lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig=""),
        "does not match",
    ),
    "a signature that is not one": (
        lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="AAAA"),
        "does not match",
    ),
    "a hint at the right key, taken away": (
        without_hint,
        "does not match",
    ),
    "a hint at another key": (
        lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint="0" * 64),
        "is signed with another key",
    ),
    "signatures of the wrong type": (
        lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig=5),
        "has an invalid signature",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("name", SIGNED)
def test_a_forged_bundle_is_never_verified(tmp_path: Path, keys: Keys, how: str, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    change, words = FORGED[how]
    edited(folder / name, change)
    report = trusted(folder, keys, name)
    assert report.status == 1
    assert not report.items
    assert words in str(report)
    assert "signature verified" not in str(report)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "two signatures": (
        lambda bundle: bundle["dsseEnvelope"]["signatures"].append({}),
        "it has 2 signatures, expected 1",
    ),
    "signatures": (lambda bundle: bundle["dsseEnvelope"].update(signatures={}), "it has no signatures, expected 1"),
    "media type": (lambda bundle: bundle.update(mediaType="application/x"), "its media type is 'application/x'"),
    "payload type": (lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain"), "its payload is"),
    "payload": (lambda bundle: bundle["dsseEnvelope"].update(payload="%%%"), "refused, and nothing was compared"),
    "payload of a number": (lambda bundle: bundle["dsseEnvelope"].update(payload=3), "its payload is not text"),
    "no envelope": (lambda bundle: bundle.pop("dsseEnvelope"), "neither an in-toto statement nor a bundle"),
    "envelope": (lambda bundle: bundle.update(dsseEnvelope=[]), "is not an object"),
    "no material": (lambda bundle: bundle.pop("verificationMaterial"), "is not an object"),
    "two materials": (
        lambda bundle: bundle["verificationMaterial"].update(certificate={}),
        "it names 2 kinds of signer, expected 1",
    ),
    "hint": (lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=[1]), "its key hint"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_bundle_that_is_not_sound_is_refused(tmp_path: Path, keys: Keys, how: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    change, words = REFUSED[how]
    edited(folder / TENSORS, change)
    with pytest.raises(OperationError) as raised:
        trusted(folder, keys, TENSORS)
    assert words in str(raised.value)
    with pytest.raises(OperationError):
        verify(folder, statements=[folder / TENSORS])


def test_a_sound_signature_of_an_unsound_statement_is_refused(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    statement = json.dumps(
        {"_type": "https://in-toto.io/Statement/v1", "predicateType": "x", "subject": []}
    )
    (tmp_path / "odd.sig").write_bytes(KeySigning(keys.private).sign([statement.encode()])[0])
    with pytest.raises(
        OperationError,
        match=r"odd.sig: refused, and nothing was compared: its predicate type is 'x'",
    ):
        verify(folder, signatures=[tmp_path / "odd.sig"], trust=Trust(key=keys.public))


def test_an_old_bundle_without_a_hint_is_verified_and_the_library_prints_nothing(
    tmp_path: Path, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    edited(
        folder / TENSORS,
        lambda bundle: bundle["verificationMaterial"].update(publicKey={"rawBytes": "QQ=="}),
    )
    report = trusted(folder, keys, TENSORS)
    assert report.status == 0
    assert "older verification material format" in " ".join(report.statements[0].notes)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("change", ["repair", "dcp", "bin", "shards"])
def test_a_signature_of_tensors_survives(tmp_path: Path, keys: Keys, change: str) -> None:
    """The exhaustive form, over every source and change, is that of unsigned statements."""
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    signature = tmp_path / TENSORS
    signature.write_bytes((folder / TENSORS).read_bytes())
    if change == "repair":
        repair(folder, policy=Policy(allow=frozenset({"no-format-metadata"})))
    else:
        new = tmp_path / "new"
        if change == "shards":
            migrate(folder, new, to="safetensors", max_shard_size=2000)
        else:
            migrate(folder, new, to=change)
        folder = new
    trust = Trust(key=keys.public)
    report = verify(folder, signatures=[signature], trust=trust)
    assert report.status == 0
    assert f"tensors, signed by {keys.public}" in str(report)
    piece = place(folder, "layers.2.weight")
    flip(piece.path, piece.offset + 5)
    report = verify(folder, signatures=[signature], trust=trust)
    assert report.status == 1
    assert wrong(report)["layers.2.weight"][0] == "changed"


SECRET = b"correct horse battery staple"


def test_blake3_without_the_extra_names_it(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    hashing = model_signing.hashing.Config().use_file_serialization(hashing_algorithm="blake3")
    signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    signing.set_hashing_config(hashing).sign(folder, tmp_path / "blake3.sig")
    assert verify(folder, statements=[tmp_path / "blake3.sig"]).status == 0
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UsageError, match="blake3 digests need the extra"):
        verify(folder, statements=[tmp_path / "blake3.sig"])


def test_a_passphrase_is_asked_for_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    keys = Keys(tmp_path, "key", passphrase=SECRET)
    with pytest.raises(UsageError, match="the key is encrypted; next: set CKPTFIX_KEY_PASSPHRASE"):
        KeySigning(keys.private)
    with pytest.raises(UsageError, match="or the passphrase is wrong"):
        KeySigning(keys.private, b"wrong")
    assert run(["seal", str(folder), "--sign", str(keys.private)]) == 2
    monkeypatch.setenv("CKPTFIX_KEY_PASSPHRASE", "not it")
    assert run(["seal", str(folder), "--sign", str(keys.private)]) == 2
    assert not (folder / ".ckptfix").exists(), "nothing was read before the key was"
    monkeypatch.setenv("CKPTFIX_KEY_PASSPHRASE", SECRET.decode())
    assert run(["seal", str(folder), "--sign", str(keys.private)]) == 0
    assert trusted(folder, keys).status == 0
    said = "".join(capfd.readouterr())
    assert SECRET.decode() not in said
    assert "not it" not in said
    assert "PRIVATE" not in said


def test_what_is_not_a_key_is_said_without_showing_it(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    seal(folder, sign=KeySigning(keys.private))
    odd = tmp_path / "odd.pem"
    large = rsa.generate_private_key(65537, 2048)
    form = serialization.PrivateFormat.PKCS8
    odd.write_bytes(
        large.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    with pytest.raises(
        UsageError, match="expected a key on the curve P-256, P-384 or P-521, found another kind"
    ):
        KeySigning(odd)
    with pytest.raises(
        UsageError,
        match="expected a private key in PEM, found a public key; next, to create a key: openssl",
    ):
        KeySigning(keys.public)
    for path in (keys.private, odd, folder / "model.safetensors"):
        with pytest.raises(
            UsageError, match="not a public key in PEM; next: openssl pkey"
        ) as raised:
            verify(folder, signatures=[folder / FILES], trust=Trust(key=path))
        assert "BEGIN" not in str(raised.value)
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    odd.write_bytes(large.public_key().public_bytes(serialization.Encoding.PEM, kind))
    with pytest.raises(UsageError, match="expected a key on the curve P-256, P-384 or P-521"):
        verify(folder, signatures=[folder / FILES], trust=Trust(key=odd))
    with pytest.raises(UsageError, match="does not exist"):
        verify(folder, signatures=[folder / FILES], trust=Trust(key=tmp_path / "gone"))
    for trust in (Trust(), Trust(key=keys.public, identity="a", identity_provider="b")):
        with pytest.raises(UsageError, match="name the expected signer with one of"):
            verify(folder, signatures=[folder / FILES], trust=trust)
    for provider in (
        None,
        "",
    ):  # "": a variable of the shell that is not set; sigstore would take any provider
        with pytest.raises(UsageError, match="belong together"):
            verify(
                folder,
                signatures=[folder / FILES],
                trust=Trust(identity="a", identity_provider=provider),
            )
    with pytest.raises(UsageError, match="belong together"):
        verify(folder, signatures=[folder / FILES], trust=Trust(identity="a"))


def certified(folder: Path, name: str, issuer: "tuple[Any, Any] | None") -> tuple[Any, Any]:
    """Return a certificate and its key; the one without an issuer is a root that signs itself."""
    from datetime import datetime, timedelta, timezone

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                True, False, False, False, False, issuer is None, issuer is None, False, False
            ),
            True,
        )
    )
    certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    plain = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / f"{name}.pem").write_bytes(plain)
    return certificate, key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_certificate_of_the_reference_is_verified(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    root = certified(tmp_path, "root", None)
    certified(tmp_path, "signer", root)
    certified(tmp_path, "stranger", None)
    signature = tmp_path / "certificate.sig"
    signing = model_signing.signing.Config().use_certificate_signer(
        private_key=tmp_path / "signer.pem", signing_certificate=tmp_path / "signer.crt",
        certificate_chain=[tmp_path / "root.crt"],
    )  # fmt: skip
    signing.sign(folder, signature)
    report = verify(
        folder, signatures=[signature], trust=Trust(certificates=(tmp_path / "root.crt",))
    )
    assert report.status == 0
    assert (
        f"signed by a certificate issued under {tmp_path / 'root.crt'}: signature verified"
        in str(report)
    )
    report = verify(
        folder, signatures=[signature], trust=Trust(certificates=(tmp_path / "stranger.crt",))
    )
    assert report.status == 1
    assert "has an invalid signature: " in str(report)
    report = verify(folder, signatures=[signature], trust=Trust(key=keys.public))
    assert report.status == 1
    assert (
        "is signed by certificates, expected a key; next: name the signer with --certificate-chain"
        in str(report)
    )
    with pytest.raises(UsageError, match="expected certificates in PEM"):
        verify(folder, signatures=[signature], trust=Trust(certificates=(keys.public,)))


class Offline:
    """Sigstore's own classes as far as signing asks them, in place of a network."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.signed: list[bytes] = []
        self.tokens = 0
        self.is_broken = is_broken


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Offline:
    import sigstore.models
    import sigstore.oidc
    import sigstore.sign

    seen = Offline()

    class Config:
        class signing_config:
            get_oidc_url = staticmethod(lambda: "https://identity.example")

    class Context:
        def signer(self, token: Any) -> "Context":
            assert token.identity == "name@example.com"
            return self

        def __enter__(self) -> "Context":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def sign_dsse(self, statement: Any) -> Any:
            if seen.is_broken:
                raise ConnectionError("https://rekor.example did not answer\nsecond line")
            seen.signed.append(statement._contents)

            class Bundle:
                to_json = staticmethod(lambda: '{"signed": true}')

            return Bundle

    class Token:
        identity, federated_issuer = "name@example.com", "https://identity.example"

        def __init__(self, raw: str) -> None:
            assert raw == "ambient"
            seen.tokens += 1

    monkeypatch.setattr(
        sigstore.models.ClientTrustConfig, "production", staticmethod(lambda: Config)
    )
    monkeypatch.setattr(sigstore.oidc, "Issuer", lambda url: url)
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda: "ambient")
    monkeypatch.setattr(sigstore.oidc, "IdentityToken", Token)
    monkeypatch.setattr(
        sigstore.sign.SigningContext, "from_trust_config", staticmethod(lambda config: Context())
    )
    return seen


def test_sigstore_signs_both_statements_with_one_identity(tmp_path: Path, offline: Offline) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    receipt = seal(folder, sign=SigstoreSigning())
    assert offline.tokens == 1
    assert [json.loads(one)["predicateType"].split("/")[3] for one in offline.signed] == [
        "signature", "tensor-digests",
    ]  # fmt: skip
    assert receipt.signed_by == "name@example.com at https://identity.example"
    assert (
        f"{folder} --identity name@example.com --identity-provider https://identity.example"
        in str(receipt)
    )
    assert (folder / FILES).read_text() == '{"signed": true}'


def test_sigstore_that_fails_leaves_the_folder_as_it_was(tmp_path: Path, offline: Offline) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    offline.is_broken = True
    with pytest.raises(
        OperationError,
        match=r"https://rekor.example did not answer; nothing was written; next: run",
    ):
        seal(folder, sign=SigstoreSigning())
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["model.safetensors"]
    assert not (folder / ".ckptfix" / "manifest.json").exists()


def test_without_a_network_sigstore_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sigstore.models

    def unreachable() -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(sigstore.models.ClientTrustConfig, "production", staticmethod(unreachable))
    with pytest.raises(
        OperationError, match="Sigstore could not be used: no route; nothing was written"
    ):
        SigstoreSigning()
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    assert seal(folder, sign=KeySigning(Keys(tmp_path, "key").private)).status == 0
    edited(
        folder / FILES,
        lambda bundle: bundle.update(verificationMaterial={"certificate": {"rawBytes": "QQ=="}}),
    )
    trust = Trust(identity="name@example.com", identity_provider="https://identity.example")
    with pytest.raises(
        OperationError, match="no route; nothing was verified; next: run again with network access"
    ):
        verify(folder, signatures=[folder / FILES], trust=trust)
    assert "expected an identity; next: name the signer with --key" in str(
        verify(folder, signatures=[folder / TENSORS], trust=trust)
    )
    odd = tmp_path / "trust.json"
    odd.write_text("{}")
    with pytest.raises(UsageError, match="not a Sigstore trust configuration"):
        SigstoreSigning(odd)


def test_a_seal_that_signs_leads_to_its_signatures_and_a_verify_by_the_manifest_says_that_it_read_none(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    assert run(["seal", str(folder), "--sign", str(keys.private)]) == 0
    options = " ".join(f"--signature {folder / name}" for name in SIGNED)
    said = capsys.readouterr().out.splitlines()
    assert f"next: ckptfix verify {options} {folder} --key PUBLIC_KEY" in said
    assert f"or, without verifying who signed: ckptfix verify {folder}" in said
    assert run(["verify", str(folder)]) == 0
    command = f"ckptfix verify {options} --key PUBLIC_KEY {folder}"
    assert (
        f"not checked: who signed {SIGNED[0]} and {SIGNED[1]}; to verify it: {command}"
        in capsys.readouterr().out.splitlines()
    )
    words = ["--signature", str(folder / SIGNED[0]), "--key", str(keys.public)]
    assert run(["verify", str(folder), *words]) == 0
    assert "not checked: who signed" not in capsys.readouterr().out


def test_the_command_of_the_reference_verifies_what_ours_signs(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    KINDS["safetensors"](folder)
    assert run(["seal", str(folder), "--sign", str(keys.private)]) == 0
    arguments = [
        "verify",
        "key",
        str(folder),
        "--signature",
        str(folder / FILES),
        "--public_key",
        str(keys.public),
    ]
    for status in (0, 1):
        done = subprocess.run(
            [sys.executable, "-m", "model_signing", *arguments], capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
        assert (
            run(
                [
                    "verify",
                    str(folder),
                    "--signature",
                    str(folder / FILES),
                    "--key",
                    str(keys.public),
                ]
            )
            == status
        )
        flip(folder / "model.safetensors", 300)


def test_without_the_extra_the_message_names_it(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("x")
    code = (
        "import sys; sys.modules['cryptography'] = None; from ckptfix.cli import run; "
        f"sys.exit(run(['seal', {str(tmp_path)!r}, '--sign', {str(tmp_path / 'key.pem')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2
    assert "signatures need the signing extra: pip install 'ckptfix[signing]'" in done.stderr
