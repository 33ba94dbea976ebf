"""``ckptfix seal``."""

import os
import sys
from pathlib import Path

import click

from ckptfix.cli.report import Report
from ckptfix.cli.several_paths import run_each, state_after_seal
from ckptfix.cli.verb_options import PATH, Verb
from ckptfix.errors import UsageError
from ckptfix.storage.executor import Executor
from ckptfix.verification.seal import SealReceipt, seal
from ckptfix.verification.signatures import KeySigning, Signing, SigstoreSigning, key_is_encrypted

_PASSPHRASE = "CKPTFIX_KEY_PASSPHRASE"


@click.command(
    "seal",
    cls=Verb,
    rare=["--ranges", "--with-sha256", "--no-tensors", "--trust-config"],
    shared=lambda params: "",
    examples=[
        (
            "ckptfix seal CHECKPOINT",
            "Write the manifest; ckptfix verify CHECKPOINT compares with it later.",
        ),
        (
            "ckptfix seal CHECKPOINT --sign key.pem",
            "Also sign the files (model.sig) and the tensors (tensors.sig).",
        ),
    ],
)
@click.argument("paths", nargs=-1, required=True, metavar="DIR...", type=PATH)
@click.option(
    "--force",
    is_flag=True,
    help="Seal the folder even if it is damaged, incomplete or no longer matches its manifest.",
)
@click.option(
    "--ranges", is_flag=True,
    help="For files over 1 GB, write a sha256 for every 1 GB range instead of one per file, so "
    "many processes can share the work.",
)  # fmt: skip
@click.option(
    "--with-sha256",
    is_flag=True,
    help="With --ranges: also write the sha256 of each file over 1 GB.",
)
@click.option(
    "--no-tensors", is_flag=True,
    help="Write digests of files only, not of tensors. Takes half the time if the CPU is the bottleneck.",
)  # fmt: skip
@click.option(
    "--oms", is_flag=True,
    help="Also write unsigned OpenSSF Model Signing statements: model.oms.json and tensors.oms.json.",
)  # fmt: skip
@click.option(
    "--sign", type=PATH, metavar="KEY",
    help="Sign these statements offline with a private key in PEM: model.sig and tensors.sig. The passphrase "
    "comes from CKPTFIX_KEY_PASSPHRASE or a prompt.",
)  # fmt: skip
@click.option(
    "--sigstore",
    is_flag=True,
    help="Sign the statements with your identity, through Sigstore's public instance.",
)
@click.option(
    "--trust-config",
    type=PATH,
    metavar="FILE",
    help="Use the Sigstore instance that this file describes.",
)
def seal_command(
    paths: tuple[str, ...], force: bool, ranges: bool, with_sha256: bool, no_tensors: bool,
    oms: bool, sign: str | None, sigstore: bool, trust_config: str | None, report: Report,
    executor: Executor,
) -> int:  # fmt: skip
    """Write the checksums of checkpoints into their manifests.

    Writes the sha256 of every file and tensor into the manifest of each DIR, for ckptfix verify to
    compare with later. With a key or an identity, they are also signed, for other tools to verify.
    """
    if with_sha256 and not ranges:
        raise UsageError(
            "--with-sha256 requires --ranges; without --ranges every file gets its sha256 anyway"
        )
    signing = _signing(sign, trust_config, sigstore=sigstore)

    def work(path: str) -> SealReceipt:
        with report.progress(f"reading {path}") as progress:
            return seal(
                path,
                force=force,
                ranges=ranges,
                with_sha256=with_sha256,
                tensors=not no_tensors,
                oms=oms,
                sign=signing,
                progress=progress,
                executor=executor,
            )

    return run_each(
        report,
        paths,
        work,
        word=lambda receipt: "sealed" if receipt.written else "refused",
        order=["refused", "sealed"],
        state_after=state_after_seal,
        executor=executor,
    )


def _signing(key: str | None, trust_config: str | None, *, sigstore: bool) -> Signing | None:
    """Return what signs, before anything is read of a checkpoint: a key that cannot be used is said
    at once.
    """
    if key is not None and sigstore:
        raise UsageError("--sign uses a key and --sigstore an identity; choose one of them")
    if trust_config is not None and not sigstore:
        raise UsageError("--trust-config requires --sigstore")
    if sigstore:
        return SigstoreSigning(trust_config)
    if key is None:
        return None
    passphrase = os.environ.get(_PASSPHRASE, "")
    if not passphrase and sys.stdin.isatty() and key_is_encrypted(Path(key)):
        passphrase = click.prompt(f"Passphrase for {key}", hide_input=True, err=True)
    return KeySigning(key, passphrase.encode() or None)
