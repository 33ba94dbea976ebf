"""Scripts and notebooks by their syntax tree: what is found, where, and that nothing is run."""

import json
from pathlib import Path

import pytest

from ckptfix.environment.facts.script import Script, read_script
from tests.environment.building import script


def wheres(places: "tuple[object, ...]") -> list[str]:
    return [str(place).partition(":")[0] for place in places]


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import os\nopen({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(1)\n")
    assert read_script(str(path)).problem == ""
    assert not (tmp_path / "ran").exists()


def test_names_are_followed_through_imports() -> None:
    uses = script("""
        import accelerate as acc
        import accelerate.utils
        from accelerate import Accelerator as A, PartialState
        from accelerate.utils import set_seed
        from . import accelerate_helpers
        from .accelerate import Own
        np.load
        acc.load_checkpoint_in_model
        A()
        """).uses
    assert [name for name, _ in uses.taken] == [
        "utils", "Accelerator", "PartialState", "utils", "utils.set_seed",
        "load_checkpoint_in_model",
    ]  # fmt: skip
    assert wheres(uses.accelerators) == ["line 9"]


def test_module_level_is_told_from_functions() -> None:
    uses = script("""
        from accelerate import Accelerator, PartialState
        import torch
        def f():
            Accelerator(); torch.cuda.set_device(0)
        g = lambda: model.to("cuda")
        class Config:
            accelerator = Accelerator()
        if __name__ == "__main__":
            PartialState()
            torch.cuda.is_available()
            torch.ones(1, device="cuda:0") + torch.ones(1, device="cpu")
            torch.cuda.empty_cache()
            model.to("cpu").to(device)
        """).uses
    assert wheres(uses.made_early) == ["line 7"]
    assert wheres(uses.touched_early) == ["line 9", "line 11"]


@pytest.mark.parametrize(
    ("line", "touches"),
    [
        ("torch.cuda.manual_seed_all(0)", False),
        ("torch.cuda.manual_seed(0)", False),
        ("torch.cuda.empty_cache()", False),
        ("torch.cuda.is_initialized()", False),
        ("torch.cuda.memory_allocated()", False),
        ("torch.cuda.is_bf16_supported()", True),
        ("torch.cuda.current_device()", True),
        ("torch.cuda.Stream()", True),
        ("torch.cuda.synchronize()", True),
        ("model.to('cuda')", True),
        ("model.to(torch.device('cuda'))", True),
        ("model.to(torch.device('cuda', 0))", True),
        ("model.to(torch.device(type='cuda', index=0))", True),
        ("model.to(torch.device('cpu'))", False),
        ("model.to(device='cuda:1')", True),
        ("torch.ones(1, device=torch.device('cuda:0'))", True),
        ("torch.ones(1, device=f'cuda:{rank}')", True),
        ("device = torch.device('cuda')", False),
        ("torch.device(type='cuda')", False),
        ("device = torch.device('cuda')\nmodel.to(device)", True),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel.to(device)", True),
        ("device = 'cuda'\ndevice = 'cpu'\nmodel.to(device)", False),
        ("def f():\n    device = 'cuda'\nmodel.to(device)", False),
    ],
)
def test_what_starts_cuda(line: str, touches: bool) -> None:
    assert bool(script(f"import torch\n{line}").uses.touched_early) is touches


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("'auto'", True),
        ("'balanced_low_0'", True),
        ("device_map", True),
        ("{'a': 0, 'b': 1}", True),
        ("{**a}", True),
        ("infer_auto_device_map(m)", True),
        ("None", False),
        ("0", False),
        ("'cuda:0'", False),
        ("{'': PartialState().process_index}", False),
        ("{'': 0}", False),
        ("accelerator.device", False),
        ("torch.device('cuda')", False),
        ("one", False),
    ],
)
def test_device_maps_that_may_have_several_entries(argument: str, found: bool) -> None:
    """``Accelerator.prepare`` refuses those with more than one (``verify_device_map``)."""
    text = f"import torch\none = {{'': 0}}\nModel.from_pretrained('x', device_map={argument})"
    assert bool(script(text).uses.device_maps) is found


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    {}\nexcept ImportError:\n    from accelerate.old import x",
        "try:\n    {}\nexcept (ValueError, ModuleNotFoundError):\n    pass",
        "try:\n    {}\nexcept:\n    pass",
        "with contextlib.suppress(ImportError):\n    {}",
        "if is_accelerate_version('>=', '2'):\n    {}",
        "if TYPE_CHECKING:\n    {}",
    ],
)
def test_names_that_may_be_missing_are_not_taken(text: str) -> None:
    assert script(text.format("from accelerate import Anything")).uses.taken == ()


def test_names_that_a_try_does_not_cover_are_taken() -> None:
    text = "try:\n    from accelerate import A\nexcept ValueError:\n    from accelerate import B\n"
    assert [name for name, _ in script(text).uses.taken] == ["A", "B"]
    text = "try:\n    x()\nexcept ImportError:\n    pass\nelse:\n    from accelerate import C\n"
    assert [name for name, _ in script(text).uses.taken] == ["C"]


def test_names_of_modules_below_accelerate_are_followed() -> None:
    uses = script("""
        import accelerate.utils as U
        from accelerate.state import PartialState
        from accelerate import state
        U.modeling.find
        state.local
        """).uses
    assert [name for name, _ in uses.taken] == [
        "utils", "state", "state.PartialState", "state", "utils.modeling.find",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("loss.backward()", True),
        ("self.loss.backward(retain_graph=True)", True),
        ("scaler.scale(loss).backward()", True),
        ("accelerator.backward(loss)", False),
        ("engine.backward(loss)", False),
        ("loss.backward(gradient)", False),
        ("torch.autograd.backward([loss])", False),
        ("backward()", False),
    ],
)
def test_plain_backward(call: str, found: bool) -> None:
    assert bool(script(call).uses.backwards) is found


@pytest.mark.parametrize(
    ("made", "models", "optimizers"),
    [
        ("a = nn.Linear(2, 2)", ("a",), ()),
        ("a = AutoModelForCausalLM.from_pretrained('x')", ("a",), ()),
        ("a = AutoTokenizer.from_pretrained('x')", (), ()),
        ("a = GPT2LMHeadModel(config)", ("a",), ()),
        ("a = Own()", ("a",), ()),
        ("a = torch.optim.AdamW(p)", (), ("a",)),
        ("a = torch.optim.lr_scheduler.StepLR(o)", (), ()),
        ("a = torch.utils.data.DataLoader(d)", (), ()),
        ("a = make()", (), ()),
    ],
)
def test_models_and_optimizers_by_what_made_them(
    made: str, models: tuple[str, ...], optimizers: tuple[str, ...]
) -> None:
    text = (
        f"import torch\nfrom torch import nn\nclass Own(nn.Module): pass\n{made}\na = "
        "accelerator.prepare(a)"
    )
    (call,) = script(text).uses.prepared
    assert (call.accelerator, call.models, call.optimizers) == ("accelerator", models, optimizers)


@pytest.mark.parametrize(
    ("name", "models", "optimizers"),
    [
        ("self.model", ("self.model",), ()),
        ("ema_model", ("ema_model",), ()),
        ("teacher", ("teacher",), ()),
        ("model_optimizer", (), ("model_optimizer",)),
        ("opt", (), ("opt",)),
        ("train_loader", (), ()),
        ("options", (), ()),
        ("internet_data", (), ()),
    ],
)
def test_models_and_optimizers_by_their_names(
    name: str, models: tuple[str, ...], optimizers: tuple[str, ...]
) -> None:
    (call,) = script(f"acc.prepare({name}, *others)").uses.prepared
    assert (call.models, call.optimizers) == (models, optimizers)


def test_options_of_argparse_and_click() -> None:
    text = """
        p.add_argument('--learning-rate', '-l')
        p.add_argument('path')
        @click.option('--steps', default='--no')
        def f(): ...
        """
    assert script(text).uses.options == frozenset({"learning_rate", "l", "steps"})
    assert script("from transformers import HfArgumentParser").uses.options is None


def test_what_needs_a_compiler() -> None:
    assert wheres(script("import torch\ntorch.compile(m)").uses.builds) == ["line 2"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("f, num_processes=2", 1),
        ("f, (), 2", 1),
        ("f", 1),
        ("f, num_processes=1", 0),
        ("f, (), 1", 0),
    ],
)
def test_launches_of_several_processes(arguments: str, found: int) -> None:
    assert (
        len(script(f"import accelerate\naccelerate.notebook_launcher({arguments})").uses.launches)
        == found
    )


def read(tmp_path: Path, data: bytes, name: str = "train.py") -> Script:
    (tmp_path / name).write_bytes(data)
    return read_script(str(tmp_path / name))


@pytest.mark.parametrize(
    "data",
    [
        b"def f(:\n",
        b"\xff\xfe\x00",
        b"a = 1\0",
        b"(" * 10_000,
        b"-" * 100_000 + b"1",
        b"# coding: no-such\n",
        b"print 'old'\n",
    ],
)
def test_text_that_is_no_python_is_a_problem_and_no_error(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data).problem


def test_warnings_of_the_script_stay_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, b"pattern = '\\d'\nif pattern is 'x': ...\n").problem == ""


def test_long_lines_are_cut(tmp_path: Path) -> None:
    text = "from accelerate import Accelerator\nAccelerator(" + "x=1, " * 50 + ")\n"
    (place,) = read(tmp_path, text.encode()).uses.accelerators
    assert len(str(place)) < 120


def notebook(*sources: "str | list[str]") -> bytes:
    cells: list[dict[str, object]] = [{"cell_type": "markdown", "source": "Accelerator()"}]
    return json.dumps(
        {"cells": cells + [{"cell_type": "code", "source": source} for source in sources]}
    ).encode()


def test_a_notebook_cell_by_cell(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        notebook(
            [
                "%pip install accelerate\n",
                "!nvidia-smi\n",
                "from accelerate import Accelerator, notebook_launcher\n",
            ],
            "%%bash\nthis is no python",
            "if True:\n    %matplotlib inline\n    accelerator = Accelerator()",
            "notebook_launcher(train, num_processes=2)",
        ),
        "train.ipynb",
    )
    assert found.problem == ""
    assert [str(place) for place in found.uses.made_early] == [
        "cell 3, line 3: accelerator = Accelerator()"
    ]
    assert found.uses.made_early[0].order < found.uses.launches[0].order


def test_a_bad_cell_hides_no_other(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        notebook("def f(:", "from accelerate import Accelerator\nAccelerator()"),
        "train.ipynb",
    )
    assert [problem.startswith("cell 1, line 1: ") for problem in found.unread] == [True]
    assert len(found.uses.made_early) == 1


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"cells": 3}', b'{"cells": [{}]}', b"[" * 100_000]
)
def test_no_notebook_is_a_problem_and_no_error(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data, "train.ipynb").problem.startswith("not a notebook: ")
