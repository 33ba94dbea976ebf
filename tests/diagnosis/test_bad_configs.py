"""Configs as no library writes them: ``check`` answers with findings or "not checked", soon,
whatever a field holds.

The fields are those that rules read: a first check of each folder records them, so that the fields
of a new rule are tried with the others.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
from transformers import FSMTConfig, FSMTModel

from ckptfix import check
from ckptfix.checkpoint import model_configs
from tests import tiny_adapters as tiny
from tests.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
OWN = "salvage.json"
"""Written by ckptfix, and no input of a loader."""
SOON = 5.0
"""Seconds of the processor. The slowest check of these folders takes 0.1 s."""

TARGETS: Any = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, Any] = {
    "LORA": peft.LoraConfig(
        r=4, rank_pattern={"v_proj": 2}, modules_to_save=["lm_head"], **TARGETS
    ),
    "LOHA": peft.LoHaConfig(r=4, **TARGETS),
    "IA3": peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
_TINY: Any = diffusers.AutoencoderTiny
MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.llama,
    "tied": tiny.tied_llama,
    "gpt2": tiny.gpt2,
    "bert": tiny.bert,
    "mixtral": tiny.mixtral,
    "t5": tiny.t5,
    "diffusers": lambda: _TINY(
        encoder_block_out_channels=(4, 4), decoder_block_out_channels=(4, 4),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), latent_channels=4,
    ),
}  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, math.nan, math.inf, 10**30, 10**4000, "8", "", "\0", "(a|a)*" * 40,
    "x" * 100_000, [], [None], [[]], ["q_proj", 7], [0] * 100_000, {}, {"a": {}}, {"": None},
    {"x": "8"}, {"(": 1}, json.loads("[" * 400 + "]" * 400),
)  # fmt: skip
"""Values of one field. The patterns are those that a rule may take for a regular expression."""

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"r": 8, "peft_',
    "html": b"<!DOCTYPE html>",
    "list": b"[]",
    "null": b"null",
    "number": b"1e999",
    "text": b'"x"',
    "object": b"{}",
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits": b'{"r": ' + b"9" * 100_000 + b"}",
    "UTF-16": '{"r": 8}'.encode("utf-16"),
    "no UTF-8": b'{"r": "\xff"}',
    "surrogate": b'{"r": "\\ud800", "\\udfff": 1}',
    "NUL": b"\0" * 4096,
    "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
}


def judged(folder: Path) -> Any:
    """Return the report on a folder, with all of its sentences made."""
    begin = time.process_time()
    report = check(folder)
    assert time.process_time() - begin < SOON
    json.dumps(report.as_json())
    assert report.status in (0, 1)
    return report


def configs(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.json")) if path.name != OWN]


def folders(root: Path) -> Iterator[Path]:
    """Make the folders: those of the libraries, and the golden ones with a config, one of each
    code.
    """
    for name, config in ADAPTERS.items():
        tiny.saved(root / name, config)
        yield root / name
    for name, make in MODELS.items():
        make().save_pretrained(root / name)
        yield root / name
    golden = {
        json.loads((path / "case.json").read_text())["code"]: path
        for path in sorted(GOLDEN.iterdir())
    }
    for code, path in golden.items():
        if configs(path / "checkpoint"):
            shutil.copytree(path / "checkpoint", root / code)
            yield root / code


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(folders(tmp_path_factory.mktemp("folders")))


class Recorded(dict[str, Any]):
    """An object of a config that notes the keys that rules ask for, as paths from the root of the
    file.
    """

    def __init__(
        self, values: dict[str, Any], asked: set[tuple[str, ...]], path: tuple[str, ...]
    ) -> None:
        super().__init__(
            {
                key: Recorded(value, asked, (*path, key)) if isinstance(value, dict) else value
                for key, value in values.items()
            }
        )
        self.asked, self.path = asked, path

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add((*self.path, key))
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add((*self.path, key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add((*self.path, str(key)))
        return super().__contains__(key)


def fields_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[str, ...]]]:
    """Return the fields of each config of a folder that a check asks for, and those that are
    there.
    """
    asked: dict[str, set[tuple[str, ...]]] = {}
    read = model_configs._read_object

    def recorded(path: Path) -> dict[str, Any]:
        return Recorded(read(path), asked.setdefault(path.name, set()), ())

    with monkeypatch.context() as patched:
        patched.setattr(model_configs, "_read_object", recorded)
        judged(folder)
    for path in configs(folder):
        asked.setdefault(path.name, set())
        try:
            document = json.loads(path.read_text())
        except ValueError:
            continue
        asked[path.name].update((key,) for key in document)
    return {name: fields for name, fields in asked.items() if (folder / name).is_file()}


def with_field(document: dict[str, Any], field: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a document with another value of a field, in objects that are made where they are
    missing.
    """
    first, *rest = field
    if not rest:
        return {**document, first: value}
    inner = document.get(first)
    return {
        **document,
        first: with_field(inner if isinstance(inner, dict) else {}, tuple(rest), value),
    }


def test_the_rules_ask_for_fields(made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the record could be empty, and nothing would be tried."""
    asked = {
        field
        for folder in made
        for fields in fields_of(folder, monkeypatch).values()
        for field in fields
    }
    names = ("r", "rank_pattern", "target_modules", "architectures", "vocab_size")
    assert {(name,) for name in names} <= asked


@pytest.mark.slow
def test_any_value_of_any_field(
    made: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [
        (folder, name, field, value)
        for folder in made
        for name, fields in fields_of(folder, monkeypatch).items()
        for field in sorted(fields)
        for value in VALUES
    ]
    for folder, name, field, value in sampled(cases):
        path, original = folder / name, (folder / name).read_bytes()
        try:
            document = json.loads(original)
        except ValueError:
            continue
        try:
            path.write_text(json.dumps(with_field(document, field, value)))
            judged(folder)
        except Exception as error:
            raise AssertionError(
                f"{folder.name}/{name}: {'.'.join(field)} = {value!r:.60}"
            ) from error
        finally:
            path.write_bytes(original)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_config_that_holds_no_object_is_told(made: list[Path], content: str) -> None:
    for folder in made:
        for path in list(folder.glob("*.json")):
            original = path.read_bytes()
            path.write_bytes(CONTENTS[content])
            try:
                report = judged(folder)
            finally:
                path.write_bytes(original)
            problems = report.understood.problems if report.understood else ()
            said = [*map(str, report.all_findings), *report.not_checked, *problems]
            is_named = any(path.name in sentence for sentence in said)
            assert is_named or content == "surrogate", (folder.name, path.name)


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_a_config_of_100_megabytes_a_pipe_and_a_link_to_itself(
    made: list[Path], tmp_path: Path, name: str
) -> None:
    source = next(folder for folder in made if (folder / name).is_file())
    for kind in ("large", "pipe", "link", "folder"):
        folder = tmp_path / kind
        shutil.copytree(source, folder)
        (folder / name).unlink()
        if kind == "large":
            (folder / name).write_bytes(
                b'{"r": 8, "architectures": ["x"]' + b" " * (100 << 20) + b"}"
            )
        elif kind == "pipe":
            os.mkfifo(folder / name)
        elif kind == "link":
            (folder / name).symlink_to(name)
        else:
            (folder / name).mkdir()
        judged(folder)


def test_keys_twice_are_read_as_the_loaders_read_them(tmp_path: Path) -> None:
    """json.loads takes the last value, here and in the libraries."""
    tensors = tiny.lora(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    text = path.read_text().rstrip().removesuffix("}")
    for rank, codes in ((4, []), (2, ["mismatched-adapter"])):
        path.write_text(f'{text}, "r": {rank}}}')
        assert [finding.code for finding in judged(tmp_path / "adapter").findings] == codes
        assert tiny.live(tmp_path / "adapter", tensors) == ("RuntimeError" if codes else "8 of 8")


@pytest.mark.parametrize(
    "content",
    ["{}", '{"r": 4}', '{"peft_type": 7, "r": 4}', '{"peft_type": null}', '{"peft_type": "lora"}'],
)
def test_an_adapter_whose_config_does_not_say_its_type_is_told(
    tmp_path: Path, content: str
) -> None:
    root = tmp_path / "adapter"
    tensors = tiny.lora(root)
    assert judged(root).status == 0
    (root / "adapter_config.json").write_text(content)
    assert tiny.live(root, tensors) == "KeyError"
    (finding,) = judged(root).findings
    assert (finding.code, finding.severity.value) == ("incomplete-checkpoint", "warning")
    assert str(finding) == (
        "adapter_config.json: no 'peft_type' that PEFT knows, so PeftModel.from_pretrained fails"
    )
    # Adapters of another library have such a config, and weights of another name.
    (root / "adapter_model.safetensors").rename(root / "pytorch_adapter.safetensors")
    assert not judged(root).findings


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_positions_that_follow_the_padding_token_are_no_mismatch(tmp_path: Path, pad: int) -> None:
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32,
        pad_token_id=pad,
    )  # fmt: skip
    FSMTModel(config).save_pretrained(tmp_path)
    assert check(tmp_path).findings == ()
