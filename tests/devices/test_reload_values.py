"""NaN, Inf and weights of zeros in a reload: judged as ``verify --data`` judges them, and traced to
a module.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import verify
from ckptfix.devices.reload import arrivals
from ckptfix.devices.reload.outputs import deviation, holds_nan, output_tensors
from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.stored_weights import file_bytes
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload import outcomes, text_of
from tests.simulated.models import transformer

pytestmark = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)

NAN, INF = float("nan"), float("inf")


def saved(folder: Path, change: Callable[[Head], None], kind: type[Head] = Head) -> Path:
    model = kind()
    with torch.no_grad():
        change(model)
    return save_model(folder, model)


def reloaded(folder: Path, kind: type[Head] = Head, inputs: Any = None) -> ReloadReport:
    return verify_reload(folder, model=lambda: (kind(), eights() if inputs is None else inputs))


def one_nan(model: Head) -> None:
    model.first.weight[0, 3] = NAN


def test_a_nan_in_a_weight_fails_and_names_the_first_module_whose_output_has_it(
    tmp_path: Path,
) -> None:
    report = reloaded(saved(tmp_path / "c", one_nan))
    assert report.status == 1
    assert (
        text_of(report, Subject.VALUES, Outcome.FAILED)
        == "nonfinite: model.safetensors: 'first.weight' (F32 [8, 8]) holds 1 NaN, the first at "
        "index 3"
    )
    assert (
        text_of(report, Subject.OUTPUTS, Outcome.FAILED)
        == "the output on cpu alone contains NaN: 16 of 16 numbers in output, the first at index 0; "
        "NaN first appears in the output of 'first' (Linear)"
    )
    assert report.verdict == "the reload is not proven: 2 failed lines (values, outputs)"
    (step,) = report.next_steps
    assert step.startswith("resume from a checkpoint saved before the NaN or Inf appeared")
    assert str(report).splitlines()[-2:] == [report.verdict, f"next: {step}"]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_a_nan_of_any_dtype_fails_without_a_model_class(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.ones(4, 4)
    values[1, 1] = NAN
    save_file(
        {"w": values.to(dtype)}, str(tmp_path / "model.safetensors"), metadata={"format": "pt"}
    )
    report = verify_reload(tmp_path)
    assert report.status == 1
    assert "holds 1 NaN, the first at index 5" in text_of(report, Subject.VALUES, Outcome.FAILED)


def test_a_nan_in_a_torch_file_fails(tmp_path: Path) -> None:
    state = Head().state_dict()
    state["last.bias"][2] = NAN
    torch.save(state, tmp_path / "pytorch_model.bin")
    report = reloaded(tmp_path)
    assert "'last.bias' (F32 [8]) holds 1 NaN" in text_of(report, Subject.VALUES, Outcome.FAILED)
    assert "first appears in the output of 'last' (Linear)" in text_of(
        report, Subject.OUTPUTS, Outcome.FAILED
    )


class Hiding(Head):
    """Returns no number that comes from its first layer alone, as argmax hides it."""

    def after(self, output: torch.Tensor) -> Any:
        return torch.nan_to_num(output)


def test_a_nan_that_the_output_does_not_show_fails_as_a_weight_and_is_traced(
    tmp_path: Path,
) -> None:
    report = reloaded(saved(tmp_path / "c", one_nan, Hiding), Hiding)
    assert report.status == 1
    assert Subject.VALUES in {one.subject for one in report.proofs if one.outcome is Outcome.FAILED}
    assert not text_of(report, Subject.OUTPUTS, Outcome.FAILED)
    assert (
        text_of(report, Subject.OUTPUTS, Outcome.NOTE)
        == "the output on cpu alone contains no NaN, although a weight does; NaN first appears in "
        "the output of 'first' (Linear)"
    )


class Rooting(Head):
    """Computes NaN between its layers, from sound weights."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden - hidden.max() - 1).sqrt()


def test_a_nan_that_the_model_computes_names_the_module_that_is_given_it(tmp_path: Path) -> None:
    report = reloaded(save_model(tmp_path / "c", Rooting()), Rooting)
    assert report.status == 1
    assert outcomes(report, Subject.VALUES) == [Outcome.PROVEN]
    text = text_of(report, Subject.OUTPUTS, Outcome.FAILED)
    assert text.endswith(
        "NaN first appears in the output of 'last' (Linear), whose input already contains NaN"
    )
    (step,) = report.next_steps
    assert step.startswith("no weight contains NaN, so the computation produces it")


class Ending(Head):
    """Computes NaN behind its last layer."""

    def after(self, output: torch.Tensor) -> Any:
        return {"loss": output.sum() * NAN, "count": torch.ones(2, dtype=torch.long)}


def test_a_nan_behind_all_modules_names_the_model(tmp_path: Path) -> None:
    report = reloaded(save_model(tmp_path / "c", Ending()), Ending)
    text = text_of(report, Subject.OUTPUTS, Outcome.FAILED)
    assert "1 of 1 number in output['loss'], the first at index 0" in text
    assert text.endswith("NaN first appears in the output of Ending itself")


def test_a_nan_in_the_input_is_not_laid_at_a_weight(tmp_path: Path) -> None:
    inputs = eights()
    inputs[0, 0] = NAN
    report = reloaded(save_model(tmp_path / "c", Head()), inputs=inputs)
    assert "'first' (Linear), whose input already contains NaN" in text_of(
        report, Subject.OUTPUTS, Outcome.FAILED
    )


class Refusing(Head):
    """Raises for NaN, as a sampler does for probabilities."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if bool(hidden.isnan().any()):
            raise ValueError("no number")
        return hidden


def test_a_model_that_raises_for_nan_names_the_module_before_it(tmp_path: Path) -> None:
    report = reloaded(saved(tmp_path / "c", one_nan, Refusing), Refusing)
    text = text_of(report, Subject.OUTPUTS, Outcome.FAILED)
    assert text.endswith(
        "ValueError: no number; NaN first appears in the output of 'first' (Linear)"
    )
    assert len(report.next_steps) == 1
    sound = reloaded(save_model(tmp_path / "sound", Head()), inputs=torch.ones(1, 5))
    assert sound.next_steps == ("make the factory return inputs that the model accepts",)


class Unwatched(Head):
    """Refuses hooks, as a compiled module does."""

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no hooks here")


def test_a_model_that_cannot_be_watched_fails_without_a_module(tmp_path: Path) -> None:
    report = reloaded(saved(tmp_path / "c", one_nan, Unwatched), Unwatched)
    text = text_of(report, Subject.OUTPUTS, Outcome.FAILED)
    assert (
        text
        == "the output on cpu alone contains NaN: 16 of 16 numbers in output, the first at index 0"
    )


class Masked(Head):
    """Keeps a mask of -inf, and adds it to its output: what masked attention returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "causal_mask", torch.zeros(8).index_fill(0, torch.tensor([6, 7]), -INF)
        )

    def after(self, output: torch.Tensor) -> Any:
        return output + self.causal_mask


def test_inf_in_a_mask_and_in_the_output_of_one_device_are_notes(tmp_path: Path) -> None:
    report = reloaded(save_model(tmp_path / "c", Masked()), Masked)
    assert report.status == 0, str(report)
    assert (
        text_of(report, Subject.VALUES, Outcome.NOTE)
        == "nonfinite: model.safetensors: 'causal_mask' (F32 [8]) holds 2 Inf, the first at "
        "index 6"
    )
    assert text_of(report, Subject.VALUES, Outcome.PROVEN) == "values: read in 5 tensors"
    note = text_of(report, Subject.OUTPUTS, Outcome.NOTE)
    assert (
        note
        == "the output on cpu alone contains Inf: 4 of 16 numbers in output, the first at index 6"
    )
    assert outcomes(report, Subject.OUTPUTS).count(Outcome.PROVEN) == 1, "the split has the same"
    assert report.next_steps == ()


def test_nan_in_a_mask_and_inf_in_a_weight_fail(tmp_path: Path) -> None:
    def in_mask(model: Any) -> None:
        model.causal_mask[0] = NAN

    def in_weight(model: Head) -> None:
        model.last.weight[0, 0] = INF

    assert reloaded(saved(tmp_path / "mask", in_mask, Masked), Masked).status == 1
    report = reloaded(saved(tmp_path / "weight", in_weight))
    assert report.status == 1
    assert "'last.weight' (F32 [8, 8]) holds 1 Inf" in text_of(
        report, Subject.VALUES, Outcome.FAILED
    )


@pytest.mark.parametrize(
    ("left", "right"), [(NAN, INF), (INF, -INF), (INF, 1.0), (NAN, 1.0), (1.0, -INF)]
)
def test_other_nan_or_inf_at_one_index_is_never_within_a_tolerance(
    left: float, right: float
) -> None:
    one, other = torch.ones(4), torch.ones(4)
    one[2], other[2] = left, right
    assert not deviation({"a": one}, {"a": other}).is_within
    assert not deviation({"a": other}, {"a": one}).is_within
    assert "a shape, NaN, Inf" in str(deviation({"a": one}, {"a": other}))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_same_nan_or_inf_at_one_index_leaves_the_others_to_the_tolerance(value: float) -> None:
    one = torch.ones(4)
    one[2] = value
    other = one.clone()
    other[0] += 1e-6
    assert deviation({"a": one}, {"a": other}).is_within
    assert not deviation({"a": one}, {"a": other * 2}).is_within


def test_nan_is_seen_in_every_kind_of_tensor() -> None:
    assert holds_nan([{"x": torch.tensor([1.0, NAN])}])
    assert holds_nan(torch.tensor([complex(0, NAN)]))
    assert holds_nan(torch.tensor([NAN]).to(torch.float8_e5m2))
    assert holds_nan(torch.diag(torch.tensor([NAN, 1.0])).to_sparse())
    assert not holds_nan(output_tensors([torch.ones(2), torch.ones(2, dtype=torch.long), INF]))
    assert not holds_nan(torch.ones(2, device="meta"))


def no_change(model: Any) -> None:
    pass


def zeros(model: Any) -> None:
    model.first.weight.zero_()


def steps(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))


class Astray(Head):
    """Computes NaN only where accelerate has spread it."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * NAN if hasattr(self.last, "_hf_hook") else hidden


def test_a_nan_of_the_split_alone_names_its_module(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "c", Astray())
    report = verify_reload(folder, device_map={"": "disk"}, model=lambda: (Astray(), eights()))
    assert report.status == 1
    assert (
        text_of(report, Subject.OUTPUTS, Outcome.FAILED)
        == "1 of 1 run of the split over disk differs from cpu alone by more than different "
        "kernels explain: a shape, NaN, Inf or integer differs; NaN first appears in the output "
        "of 'last' (Linear), whose input already contains NaN"
    )
    assert report.next_steps == ("load the model onto one device, or try another --device-map",)


CASES: dict[str, tuple[Callable[[Any], None], bool, int]] = {
    "sound": (no_change, True, 0),
    "zeros at first": (zeros, False, 0),
    "zeros after steps": (zeros, True, 1),
    "nan": (one_nan, True, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_told_as_verify_data_tells_them(tmp_path: Path, case: str) -> None:
    change, has_steps, status = CASES[case]
    folder = saved(tmp_path / "c", change)
    if has_steps:
        steps(folder)
    report, told = verify_reload(folder), verify(folder, data=True)
    assert report.status == status
    assert bool(told.values) is (case != "sound")
    lines = [one for one in report.proofs if one.subject is Subject.VALUES]
    failed = [one.text for one in lines if one.outcome is Outcome.FAILED]
    notes = [one.text for one in lines if one.outcome is Outcome.NOTE]
    assert [*failed, *notes] == [f"{one.code}: {one}" for one in told.values]
    assert bool(failed) is bool(status)
    if case == "sound":
        words = "values: no NaN, no Inf and no all-zero matrix in 4 tensors"
        assert text_of(report, Subject.VALUES, Outcome.PROVEN) == words


def test_a_lora_that_was_never_trained_fails_as_verify_data_says(tmp_path: Path) -> None:
    state = {
        f"layers.{n}.q.lora_{m}.weight": torch.full((4, 4), float(m == "A"))
        for n in "01"
        for m in "AB"
    }
    save_file(state, str(tmp_path / "adapter_model.safetensors"), metadata={"format": "pt"})
    (tmp_path / "trainer_state.json").write_text('{"global_step": 400}')
    report, told = verify_reload(tmp_path), verify(tmp_path, data=True)
    assert [one.code for one in told.values] == ["untrained-lora"]
    assert text_of(report, Subject.VALUES, Outcome.FAILED) == f"untrained-lora: {told.values[0]}"
    assert report.next_steps == (
        "check that the optimizer gets the LoRA parameters, then train and save again",
    )


def test_many_findings_of_one_kind_are_one_line(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((2, 2), NAN) for number in range(5)}
    save_file(state, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    (line,) = (one for one in verify_reload(tmp_path).proofs if one.subject is Subject.VALUES)
    assert line.text.count("holds 4 NaN") == 3
    assert line.text.endswith("; and 2 more")


def test_values_that_were_not_read_are_not_exercised(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "q": torch.eye(3).to_sparse()}, tmp_path / "pytorch_model.bin")
    report = verify_reload(tmp_path)
    assert text_of(report, Subject.VALUES, Outcome.NOT_EXERCISED) == "values of 1 tensor: 'q'"
    assert "in 1 tensor" in text_of(report, Subject.VALUES, Outcome.PROVEN)


def test_a_transformer_of_config_json_with_a_nan_names_its_module(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=32,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert verify_reload(tmp_path).status == 0
    path = tmp_path / "model.safetensors"
    state = load_file(str(path))
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = NAN
    save_file(state, str(path), metadata={"format": "pt"})
    report = verify_reload(tmp_path)
    assert report.status == 1
    assert "NaN first appears in the output of 'model.layers.1.mlp.up_proj' (Linear)" in text_of(
        report, Subject.OUTPUTS, Outcome.FAILED
    )


def test_the_values_are_looked_at_in_the_bytes_that_are_read_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(tensor: Any, chunk: int) -> Any:
        read.append(tensor.fqn)
        return file_bytes(tensor, chunk)

    monkeypatch.setattr(arrivals, "file_bytes", counted)
    folder = save_model(tmp_path / "c", transformer())
    report = verify_reload(folder)
    assert outcomes(report, Subject.VALUES) == [Outcome.PROVEN]
    assert sorted(read) == sorted(load_file(str(folder / "model.safetensors"))), "each tensor once"
