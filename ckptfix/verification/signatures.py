"""Signatures of statements: DSSE envelopes in bundles of Sigstore, as OpenSSF Model Signing has
them.

The extra ``ckptfix[signing]`` does the cryptography, and is imported where it is used. A local key
needs no network. Private keys and passphrases are in no message.
"""

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar, NamedTuple, Protocol

from msgspec import Struct

from ckptfix.checkpoint.manifest import MAX_MANIFEST
from ckptfix.errors import OperationError, UsageError
from ckptfix.reports import Serialized
from ckptfix.storage.files import AnyPath, Openable
from ckptfix.storage.paths import existing, shell_path
from ckptfix.storage.reading import open_reader
from ckptfix.verification.statements import FileStatement, Statement, parse_statement, strict_json
from ckptfix.wording import Line, count_of, line

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MATERIALS = {
    "publicKey": "a key",
    "x509CertificateChain": "certificates",
    "certificate": "an identity",
}
_SIGN_OTHERWISE = "nothing was written; next: run again with network access, or sign with a key"
_VERIFY_OTHERWISE = (
    "nothing was verified; next: run again with network access, or with --trust-config FILE"
)
_OPTIONS = {
    "publicKey": "--key PUBLIC_KEY",
    "x509CertificateChain": "--certificate-chain CA.pem",
    "certificate": "--identity NAME --identity-provider URL",
}


class Trust(Struct, frozen=True, kw_only=True):
    """Whoever must have signed: the holder of a key, of a certificate below one of
    ``certificates``, or an identity.

    ``key``: a public key in PEM. ``identity``: as ``identity_provider`` (a URL) knows it, such as
    name@example.com. ``trust_config``: of an instance of Sigstore other than the public one.
    """

    key: str | os.PathLike[str] | None = None
    certificates: tuple[str | os.PathLike[str], ...] = ()
    identity: str | None = None
    identity_provider: str | None = None
    trust_config: str | os.PathLike[str] | None = None

    def material(self) -> str:
        """Return the part of a bundle that belongs to it. Raises UsageError unless exactly one kind
        is named.
        """
        named = [self.key is not None, bool(self.certificates), self.identity is not None]
        if sum(named) != 1:
            raise UsageError(
                "name the expected signer with one of: " + "; ".join(_OPTIONS.values())
            )
        both = (self.identity, self.identity_provider)
        if both != (None, None) and not all(both):
            raise UsageError(
                "--identity and --identity-provider belong together: a name alone proves nothing"
            )
        return next(kind for kind, is_named in zip(_MATERIALS, named, strict=True) if is_named)


OF_UPLOAD = "digests of the upload"
"""Kind of the commit marker of an upload."""


class Attestation(Serialized, Struct, frozen=True, kw_only=True):
    """A file that says what a checkpoint holds. ``kind``: "files", "tensors", "sha256sums" or
    ``OF_UPLOAD``.

    ``is_signed``: it has a signature. ``is_verified``: the signature is by whom it must be.
    ``signer``: in words. ``problem``: why it must not be relied on, "" where it may. ``notes``: of
    the library, in words.
    """

    json_keys: ClassVar = (
        "file=path kind signed=is_signed verified=is_verified signer problem notes"
    )

    path: AnyPath
    kind: str
    is_signed: bool = False
    is_verified: bool = False
    signer: str = ""
    problem: str = ""
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> Line:
        """Words about its origin, for one without a problem; they come before anything that it
        says.
        """
        if self.is_verified:
            return line(
                f"{self.path}: {self.kind}, signed by {self.signer}: signature verified",
                colour="green",
            )
        if self.is_signed:
            words = f"signature by {self.signer} not verified: anyone could have written it"
        else:
            words = "not signed: anyone could have written it"
        return line(f"{self.path}: {self.kind}, {words}", colour="yellow")


class Opened(NamedTuple):
    """A statement, None where it must not be relied on, and what is known of its origin."""

    attestation: Attestation
    statement: Statement | None


def open_statement(path: AnyPath, trust: Trust | None) -> Opened:
    """Read a statement, signed or not. ``trust``: who must have signed it; None to read it without
    verifying.

    Raises UsageError without the extra, or for a key that is none, OperationError for a file that
    is not a statement, OSError.
    """
    with open_reader(existing(path)) as reader:
        if reader.size > MAX_MANIFEST:
            raise OperationError(f"{path} is too large: {reader.size} bytes (limit {MAX_MANIFEST})")
        data = reader.read(0, reader.size)
    bundle = _bundle(data, path)
    if bundle is None:
        statement = parse_statement(data, str(path))
        found = Attestation(path=path, kind=_kind(statement))
        if trust is None:
            return Opened(found, statement)
        problem = (
            f"is not signed; to compare with it anyway: ckptfix verify --oms {shell_path(path)}"
        )
        return Opened(Attestation(path=path, kind=found.kind, problem=problem), None)
    if trust is None:
        statement = parse_statement(bundle.payload, str(path))
        return Opened(
            Attestation(path=path, kind=_kind(statement), is_signed=True, signer=bundle.signer),
            statement,
        )
    notes = StringIO()
    try:
        payload = _verified(bundle, trust, notes)
    except _Invalid as problem:
        return Opened(
            Attestation(
                path=path,
                kind="statement",
                is_signed=True,
                signer=bundle.signer,
                problem=str(problem),
            ),
            None,
        )
    statement = parse_statement(payload, str(path))
    attestation = Attestation(
        path=path,
        kind=_kind(statement),
        is_signed=True,
        is_verified=True,
        signer=_signer(trust),
        notes=tuple(" ".join(notes.getvalue().split()).split("\n")) if notes.getvalue() else (),
    )
    return Opened(attestation, statement)


class Signing(Protocol):
    """Anything that signs statements."""

    by: str
    """Who signs, in words."""
    trust: str
    """The options of ``verify`` that name the signer."""

    def sign(self, statements: Sequence[bytes]) -> list[bytes]:
        """Return a bundle for each statement."""


_NEW_KEY = "next, to create a key: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


class KeySigning:
    """Signs with a local key on one of the curves that OpenSSF Model Signing knows."""

    trust = _OPTIONS["publicKey"]

    def __init__(self, path: str | os.PathLike[str], passphrase: bytes | None = None) -> None:
        """Read the key. Raises UsageError for anything else than a private key that can be used,
        OSError.
        """
        serialization = _imported("cryptography.hazmat.primitives.serialization")
        data = _small_file(existing(path))
        if _is_encrypted(data) and not passphrase:
            raise UsageError(
                f"{path}: the key is encrypted; next: set CKPTFIX_KEY_PASSPHRASE, or run in a "
                "terminal"
            )
        try:
            key = serialization.load_pem_private_key(
                data, passphrase if _is_encrypted(data) else None
            )
        except Exception:  # of several kinds; none may show a part of the key
            if _is_encrypted(data):
                raise UsageError(f"{path}: not a private key, or the passphrase is wrong") from None
            found = ", found a public key" if b"BEGIN PUBLIC KEY" in data else ""
            raise UsageError(f"{path}: expected a private key in PEM{found}; {_NEW_KEY}") from None
        _ensure_curve(key, path)
        self._key = key
        self._hint = fingerprint(key.public_key())
        self.by = f"the key sha256:{self._hint[:16]}"

    def sign(self, statements: Sequence[bytes]) -> list[bytes]:
        """Return a bundle for each statement."""
        ec = _imported("cryptography.hazmat.primitives.asymmetric.ec")
        algorithm = ec.ECDSA(_hash_of(self._key))
        return [
            _bundle_of(statement, self._key.sign(_to_sign(statement), algorithm), self._hint)
            for statement in statements
        ]


class SigstoreSigning:
    """Signs with an identity: of the machine that this runs on, as in a workflow of GitHub, else of
    a login.
    """

    by = "an identity"
    trust = _OPTIONS["certificate"]

    def __init__(self, trust_config: str | os.PathLike[str] | None = None) -> None:
        """Fetch what Sigstore asks for. Raises OperationError where that cannot be reached,
        UsageError, OSError.
        """
        models = _imported("sigstore.models")
        oidc, sign = _imported("sigstore.oidc"), _imported("sigstore.sign")
        config = _trust_config(models, trust_config)
        try:
            self._issuer = oidc.Issuer(config.signing_config.get_oidc_url())
            self._context = sign.SigningContext.from_trust_config(config)
        except Exception as error:
            raise _unreachable(error) from error

    def sign(self, statements: Sequence[bytes]) -> list[bytes]:
        """Return a bundle for each statement, with one identity for all of them."""
        oidc, dsse = _imported("sigstore.oidc"), _imported("sigstore.dsse")
        try:
            found = oidc.detect_credential()
            token = oidc.IdentityToken(found) if found else self._issuer.identity_token()
            with self._context.signer(token) as signer:
                bundles = [signer.sign_dsse(dsse.Statement(statement)) for statement in statements]
        except Exception as error:
            raise _unreachable(error) from error
        self.by = f"{token.identity} at {token.federated_issuer}"
        words = ("--identity", token.identity, "--identity-provider", token.federated_issuer)
        self.trust = shlex.join(words)
        return [bundle.to_json().encode() for bundle in bundles]


def key_is_encrypted(path: AnyPath) -> bool:
    """Return whether a private key needs a passphrase. Raises UsageError for what is not a small
    file, OSError.
    """
    return _is_encrypted(_small_file(existing(path)))


def _is_encrypted(data: bytes) -> bool:
    return b"ENCRYPTED" in data


def fingerprint(public_key: Any) -> str:
    """Return the sha256 by which a bundle names its key: that of the public key in PEM."""
    serialization = _imported("cryptography.hazmat.primitives.serialization")
    text = public_key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(text).hexdigest()


class _Bundle(NamedTuple):
    """A bundle before anything of it is verified. ``material``: the key of ``_MATERIALS`` that it
    has.
    """

    data: bytes
    payload: bytes
    material: str
    hint: str

    @property
    def signer(self) -> str:
        """Who signed by the bundle's own word, in words."""
        if self.material == "publicKey" and self.hint:
            return f"the key sha256:{self.hint[:16]}"
        return _MATERIALS[self.material]


class _Invalid(Exception):
    """The reason why a signature is not what it must be."""


def _bundle(data: bytes, path: AnyPath) -> _Bundle | None:
    """Return a bundle, None for a statement without one. Raises OperationError for anything
    else.
    """
    try:
        document = strict_json(data)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        if "_type" in document:
            return None
        if "dsseEnvelope" not in document:
            raise ValueError("it is neither an in-toto statement nor a bundle with one")
        if document.get("mediaType") != _BUNDLE:
            raise ValueError(
                f"its media type is {str(document.get('mediaType'))[:80]!r}, expected {_BUNDLE}"
            )
        envelope, material = document["dsseEnvelope"], document.get("verificationMaterial")
        if not isinstance(envelope, dict) or not isinstance(material, dict):
            raise ValueError("its envelope or its verification material is not an object")
        if envelope.get("payloadType") != _PAYLOAD:
            raise ValueError(
                f"its payload is {str(envelope.get('payloadType'))[:80]!r}, expected {_PAYLOAD}"
            )
        signatures = envelope.get("signatures")
        if not isinstance(signatures, list) or len(signatures) != 1:
            count = (
                count_of(len(signatures), "signature")
                if isinstance(signatures, list)
                else "no signatures"
            )
            raise ValueError(f"it has {count}, expected 1")
        kinds = [kind for kind in _MATERIALS if material.get(kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"it names {count_of(len(kinds), 'kind')} of signer, expected 1")
        if not isinstance(payload := envelope.get("payload"), str):
            raise ValueError("its payload is not text")
        own = material[kinds[0]]
        hint = own.get("hint") if isinstance(own, dict) else None
        if hint is not None and not isinstance(hint, str):
            raise ValueError("its key hint is not text")
        return _Bundle(data, base64.b64decode(payload, validate=True), kinds[0], hint or "")
    except ValueError as why:
        raise OperationError(
            f"{path}: refused, and nothing was compared: {why}; next: get the file again from "
            "whoever made it"
        ) from None


def _verified(bundle: _Bundle, trust: Trust, notes: StringIO) -> bytes:
    """Return the payload whose signature is right. Raises _Invalid for any other, UsageError for a
    key that is none.
    """
    if bundle.material != trust.material():
        raise _Invalid(
            f"is signed by {_MATERIALS[bundle.material]}, expected {_MATERIALS[trust.material()]}; "
            f"next: name the signer with {_OPTIONS[bundle.material]}"
        )
    verifying = _imported("model_signing.verifying")
    if trust.key is not None:
        known = _public_key(existing(trust.key))
        own = fingerprint(known)
        if bundle.hint and bundle.hint != own:
            raise _Invalid(
                f"is signed with another key, sha256:{bundle.hint[:16]} (expected {trust.key}, "
                f"sha256:{own[:16]})"
            )
    config = verifying.Config()
    if trust.key is not None:
        config.use_elliptic_key_verifier(public_key=trust.key)
    elif trust.certificates:
        chain = [existing(one) for one in trust.certificates]
        try:
            config.use_certificate_verifier(certificate_chain=chain)
        except ValueError:
            raise UsageError(
                f"{', '.join(map(str, chain))}: expected certificates in PEM"
            ) from None
    else:
        _use_identity(config, trust)
    read = _imported(
        "model_signing._signing.sign_sigstore"
        if trust.identity
        else "model_signing._signing.sign_sigstore_pb"
    ).Signature.read
    # The public verify() of the library knows one kind of statement alone; the extra pins the
    # version that this is for. Whatever it raises for a file that somebody made up, the signature
    # is not a right one.
    try:
        with (
            NamedTemporaryFile() as file,
            redirect_stdout(notes),
        ):  # it reads files alone, and prints warnings
            file.write(bundle.data)
            file.flush()
            kind, payload = config._verifier._verify_signed_content(read(Path(file.name)))
    except Exception as error:
        raise _Invalid(_why_not(error, trust)) from None
    if kind != _PAYLOAD:
        raise _Invalid(f"signs {kind!r}, expected {_PAYLOAD}")
    return bytes(payload)


def _why_not(error: Exception, trust: Trust) -> str:
    said = str(error).split("\n")[0][:200]
    if type(error).__name__ == "InvalidSignature":
        key = trust.key if trust.key is not None else "its certificate"
        return f"has a signature that does not match {key}, or was changed after it was signed"
    return f"has an invalid signature: {said or type(error).__name__}"


def _use_identity(config: Any, trust: Trust) -> None:
    path = None if trust.trust_config is None else existing(trust.trust_config)
    try:
        config.use_sigstore_verifier(
            identity=trust.identity, oidc_issuer=trust.identity_provider, trust_config=path
        )
    except Exception as error:
        raise _unreachable(error, _VERIFY_OTHERWISE) from error


def _signer(trust: Trust) -> str:
    if trust.identity is not None:
        return f"{trust.identity} at {trust.identity_provider}"
    if trust.key is not None:
        return f"{trust.key} (sha256:{fingerprint(_public_key(existing(trust.key)))[:16]})"
    return f"a certificate issued under {', '.join(map(str, trust.certificates))}"


def _trust_config(models: Any, path: str | os.PathLike[str] | None) -> Any:
    if path is not None:
        try:
            return models.ClientTrustConfig.from_json(_small_file(existing(path)).decode())
        except ValueError as error:
            raise UsageError(
                f"{path}: not a Sigstore trust configuration: {str(error)[:200]}"
            ) from None
    try:
        return models.ClientTrustConfig.production()
    except Exception as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception, next_step: str = _SIGN_OTHERWISE) -> OperationError:
    said = str(error).split("\n")[0][:200] or type(error).__name__
    return OperationError(f"Sigstore could not be used: {said}; {next_step}")


def _public_key(path: AnyPath) -> Any:
    """Return a public key. Raises UsageError for anything else, OSError."""
    serialization = _imported("cryptography.hazmat.primitives.serialization")
    try:
        key = serialization.load_pem_public_key(_small_file(path))
    except Exception:  # of several kinds; a private key given by mistake must not be shown
        raise UsageError(
            f"{path}: not a public key in PEM; next: openssl pkey -in PRIVATE_KEY -pubout"
        ) from None
    _ensure_curve(key, path)
    return key


def _ensure_curve(key: Any, path: Openable) -> None:
    curve = getattr(getattr(key, "curve", None), "name", None)
    if curve not in _CURVES:
        raise UsageError(
            f"{path}: expected a key on the curve P-256, P-384 or P-521, found "
            f"{curve or 'another kind'}"
        )


def _hash_of(key: Any) -> Any:
    hashes = _imported("cryptography.hazmat.primitives.hashes")
    return {256: hashes.SHA256, 384: hashes.SHA384, 521: hashes.SHA512}[key.curve.key_size]()


def _to_sign(statement: bytes) -> bytes:
    """Return what a signature is over: the pre-authentication encoding of DSSE."""
    return f"DSSEv1 {len(_PAYLOAD)} {_PAYLOAD} {len(statement)} ".encode() + statement


def _bundle_of(statement: bytes, signature: bytes, hint: str) -> bytes:
    document: Mapping[str, Any] = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return (json.dumps(document) + "\n").encode()


def _kind(statement: Statement) -> str:
    return "files" if isinstance(statement, FileStatement) else "tensors"


def _small_file(path: AnyPath) -> bytes:
    with open_reader(path) as reader:
        if reader.size > 1 << 20:
            raise UsageError(
                f"{path}: expected a key or a configuration, found {reader.size} bytes"
            )
        return reader.read(0, reader.size)


def _imported(name: str) -> Any:
    """Return a module of the extra. Raises UsageError where that is not installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"signatures need the signing extra: pip install 'ckptfix[signing]' ({error})"
        ) from None
