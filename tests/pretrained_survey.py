"""Compares ``check`` with transformers on every class that can be built tiny: ``python -m
tests.pretrained_survey``.

Each is saved, and damaged: behind ``module.``, without the tensors of the last layer, and with
another size in its config. A number limits it to each Nth class. An error about a folder
that loads complete is a false alarm.
"""

import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from ckptfix import check
from ckptfix.checkpoint.architectures import Architecture, architecture_of, pattern_of
from ckptfix.checkpoint.model_configs import read_config
from ckptfix.diagnosis.loads.pretrained_models import _WIDTHS
from tests.architectures import classes
from tests.diagnosis.test_pretrained_models import CODES
from tests.tiny_models import Tensors, load, reconfigure, tensors_of, tiny, write

Damage = Callable[[Path, Tensors], None]


def damages(
    known: Architecture, tensors: Tensors, config: dict[str, Any]
) -> Iterator[tuple[str, Damage]]:
    """Yield each damage that a class can have."""
    yield "none", lambda root, tensors: None
    yield (
        "prefix",
        lambda root, tensors: write(root, {f"module.{key}": each for key, each in tensors.items()}),
    )
    yield "resized", resized
    for kind, sizes in (("layers", known.numbers), ("rows", known.rows)):
        attributes = {follows.attribute for follows in sizes.values()}
        for attribute in sorted(attributes):
            if (value := known.value(config, attribute)) is not None:
                name = "__".join(attribute.path)
                changed = {name: value + 1}
                yield kind, lambda root, _, changed=changed: reconfigure(root, **changed)  # type: ignore[misc]
            if attribute.path[-1] in _part(config, attribute.path[:-1]):
                yield "left out", lambda root, _, path=attribute.path: leave_out(root, path)  # type: ignore[misc]
    for width in {*_WIDTHS}.intersection(config):
        yield "hidden size", lambda root, _, width=width: reconfigure(root, **{width: 24})  # type: ignore[misc]
    for pattern in known.numbers:
        numbers = {
            ".".join(key.split(".")[: pattern.count(".") + 1])
            for key in tensors
            if pattern_of(key).startswith(f"{pattern}.")
        }
        if len(numbers) > 1:
            lost = max(numbers)
            yield (
                "lost",
                lambda root, tensors, lost=lost: write(  # type: ignore[misc]
                    root,
                    {key: each for key, each in tensors.items() if not key.startswith(f"{lost}.")},
                ),
            )


def resized(root: Path, tensors: Tensors) -> None:
    """Save the model with 7 tokens more, where its class can."""
    (name,) = read_config(root, "config.json")["architectures"]
    with suppress(Exception):
        model = getattr(transformers, name).from_pretrained(root)
        model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 7)
        model.save_pretrained(root)


def _part(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config.get(name) or {}
    return config


def leave_out(root: Path, path: tuple[str, ...]) -> None:
    """Take an attribute out of the config."""
    config = read_config(root, "config.json")
    del _part(config, path[:-1])[path[-1]]
    (root / "config.json").write_text(json.dumps(config))


def main(step: int) -> None:
    """Print the figures, and each answer in which the two differ."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    start, counts = time.monotonic(), Counter[str]()
    names = list(classes())[::step]
    for name in names:
        with tempfile.TemporaryDirectory() as folder, suppress(ReferenceError):
            root = Path(folder)
            try:
                tiny(name).save_pretrained(root)
                tensors = tensors_of(root)
            except Exception:
                counts["not built"] += 1
                continue
            config = read_config(root, "config.json")
            text = (root / "config.json").read_text()
            known = architecture_of(config)
            if not isinstance(known, Architecture):
                print(f"{name}: {known.reason}")
                counts["not in the table"] += 1
                continue
            for kind, damage in damages(known, tensors, config):
                write(root, tensors)
                (root / "config.json").write_text(text)
                damage(root, tensors)
                truth = load(root)
                told = [
                    finding for finding in check(root).findings
                    if finding.code in CODES and finding.severity.value == "error"
                ]  # fmt: skip
                is_healthy = truth == "complete" or truth.startswith("0 random")
                answer = (
                    "agree" if bool(told) != is_healthy else "false alarm" if told else "not told"
                )
                counts[f"{kind}: {answer}"] += 1
                if answer != "agree":
                    print(
                        f"{name}: {kind}: {answer}: {truth} {told[0] if told else ''}", flush=True
                    )
    print(
        f"{len(names)} classes, {time.monotonic() - start:.0f} s, transformers "
        f"{transformers.__version__}"
    )
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1)
