"""Signing and verifying a checkpoint, against the reference implementation of OpenSSF Model Signing
in the same run.
"""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tests.benchmarks.making import measure, write_safetensors
from tests.benchmarks.printing import show

_SHARDS = 4


def sign(folder: Path, size: int, rounds: int) -> None:
    """Print the time of ``seal --sign`` and of ``verify --signature`` as ratios to those of
    ``model_signing``.

    Both with a local key, with files in the page cache, and imports before the clock. ``seal``
    hashes every byte for its file and once more for its tensor, which the reference does not.
    """
    if find_spec("model_signing") is None:
        print("signing: left out, as it needs the extra: pip install 'ckptfix[signing]'")
        return
    model = folder / "model"
    model.mkdir()
    for number in range(_SHARDS):
        write_safetensors(model / f"part-{number}.safetensors", size // _SHARDS, f"{number}.")
    key, public = folder / "key.pem", folder / "key.pub"
    for words in (
        f"openssl ecparam -name prime256v1 -genkey -noout -out {key}",
        f"openssl pkey -in {key} -pubout -out {public}",
    ):
        subprocess.run(words.split(), check=True)
    theirs, files, tensors = folder / "reference.sig", model / "model.sig", model / "tensors.sig"
    imports = (
        "import model_signing\nfrom ckptfix import KeySigning, Trust, seal, verify\n"
        "import ckptfix.tensors.hashing"
    )
    config = (
        "set_hashing_config(model_signing.hashing.Config().set_ignored_paths(paths=['model.sig', "
        "'tensors.sig']))"
    )
    ours_key, trust = f"sign=KeySigning({str(key)!r})", f"trust=Trust(key={str(public)!r})"
    commands = {
        "reference sign": (
            f"model_signing.signing.Config().use_elliptic_key_signer(private_key={str(key)!r}).{config}.sign({str(model)!r},"
            f" {str(theirs)!r})"
        ),
        "seal --no-tensors": f"assert seal({str(model)!r}, {ours_key}, tensors=False).status == 0",
        "seal": f"assert seal({str(model)!r}, {ours_key}).status == 0",
        "reference verify": (
            f"model_signing.verifying.Config().use_elliptic_key_verifier(public_key={str(public)!r}).{config}.verify({str(model)!r},"
            f" {str(files)!r})"
        ),
        "verify files": (
            f"assert verify({str(model)!r}, signatures=[{str(files)!r}], {trust}).is_compared"
        ),
        "verify tensors": (
            f"assert verify({str(model)!r}, signatures=[{str(tensors)!r}], {trust}).is_compared"
        ),
        "verify its signature": (
            f"assert verify({str(model)!r}, signatures=[{str(theirs)!r}], {trust}).is_compared"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):  # in turns: a machine that others use changes its speed meanwhile
        # A manifest with digests of tensors keeps them.
        shutil.rmtree(model / ".ckptfix", ignore_errors=True)
        for name, command in commands.items():
            seconds[name].append(measure(imports, command)["seconds"])
    each = {name: median(found) for name, found in seconds.items()}
    gibibytes = f"{size / (1 << 30):.1f} GiB"
    for name, against, most in (
        ("seal --no-tensors", "reference sign", 1.2),
        ("seal", "reference sign", 2.5),
        ("verify files", "reference verify", 1.2),
        ("verify tensors", "reference verify", 1.2),
        ("verify its signature", "reference verify", 1.2),
    ):
        ratio = each[name] / each[against]
        figure = f"{ratio:.2f}x of {against} ({each[name]:.2f} s, {each[against]:.2f} s)"
        show(f"signing {gibibytes}, {name}", figure, f"<= {most}x", ratio <= most)
    for path in model.glob("*.safetensors"):
        path.unlink()
