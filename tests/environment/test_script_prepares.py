"""Models that are prepared twice or wrapped before, and the many healthy scripts that only look
so. What takes a loop, a method or a call to be seen twice is found by ``ckptfix run``.
"""

import json
import textwrap
from pathlib import Path

import pytest

from ckptfix.environment.facts.script import read_script
from ckptfix.environment.facts.script_uses import Uses
from tests.environment.building import script

PREAMBLE = """
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from accelerate import Accelerator
    accelerator = Accelerator()
    """

TWICE = {
    "again": (
        """
        model = accelerator.prepare(model)
        model, opt = accelerator.prepare(model, opt)
        """
    ),
    "raw": (
        """
        accelerator.prepare(model)
        accelerator.prepare(model, opt)
        """
    ),
    "raw2": (
        """
        m2 = accelerator.prepare(model)
        m3 = accelerator.prepare(model)
        """
    ),
    "other name": (
        """
        m2 = accelerator.prepare(model)
        m3 = accelerator.prepare(m2)
        """
    ),
    "same call": (
        """
        a, b = accelerator.prepare(model, model)
        """
    ),
    "nested": (
        """
        m = accelerator.prepare(accelerator.prepare(model))
        """
    ),
    "wrapped result": (
        """
        model = accelerator.prepare(model)
        model = DDP(model)
        model = accelerator.prepare(model)
        """
    ),
    "compiled": (
        """
        model = accelerator.prepare(model)
        model = torch.compile(model)
        x = accelerator.prepare(model)
        """
    ),
    "unwrapped": (
        """
        model = accelerator.prepare(model)
        raw = accelerator.unwrap_model(model)
        raw = accelerator.prepare(raw)
        """
    ),
    "module": (
        """
        model = accelerator.prepare(model)
        raw = accelerator.prepare(model.module)
        """
    ),
    "always then if": (
        """
        model = accelerator.prepare(model)
        if ev:
          model = accelerator.prepare(model)
        """
    ),
    "function": (
        """
        def main():
          acc = Accelerator()
          net = acc.prepare(net)
          net, dl = acc.prepare(net, dl)
        """
    ),
    "prepare_model": (
        """
        model = accelerator.prepare_model(model)
        model = accelerator.prepare(model)
        """
    ),
    "to": (
        """
        model = accelerator.prepare(model).to('cpu')
        model = accelerator.prepare(model)
        """
    ),
    "list": (
        """
        model, opt = accelerator.prepare(model, opt)
        model, opt, dl = accelerator.prepare(model, opt, dl)
        """
    ),
    "with": (
        """
        with x:
          model = accelerator.prepare(model)
        model = accelerator.prepare(model)
        """
    ),
}

ONCE = {
    "in a branch": (
        """
        if ready:
          model = accelerator.prepare(model)
          accelerator.free_memory()
        model = accelerator.prepare(model)
        """
    ),
    "made in a branch": (
        """
        model = accelerator.prepare(model)
        if again:
          model = build()
        model = accelerator.prepare(model)
        """
    ),
    "an accelerator of a branch": (
        """
        model = accelerator.prepare(model)
        if again:
          accelerator = Accelerator()
        model = accelerator.prepare(model)
        """
    ),
    "once": (
        """
        model, opt = accelerator.prepare(model, opt)
        """
    ),
    "two models": (
        """
        a = accelerator.prepare(student)
        b = accelerator.prepare(teacher)
        """
    ),
    "arms": (
        """
        if a:
          model = accelerator.prepare(model)
        else:
          model, o = accelerator.prepare(model, o)
        """
    ),
    "correlated": (
        """
        if a:
          model = accelerator.prepare(model)
        if not a:
          model = accelerator.prepare(model)
        """
    ),
    "returns": (
        """
        def f():
          if a:
            m = accelerator.prepare(m)
            return m
          m = accelerator.prepare(m)
        """
    ),
    "rebuilt": (
        """
        model = accelerator.prepare(model)
        model = build()
        model = accelerator.prepare(model)
        """
    ),
    "loop over": (
        """
        for model in models:
          prepared.append(accelerator.prepare(model))
        """
    ),
    "loop rebuilt": (
        """
        for i in range(3):
          model = build()
          model = accelerator.prepare(model)
        """
    ),
    "freed": (
        """
        model = accelerator.prepare(model)
        accelerator.free_memory()
        model = accelerator.prepare(model)
        """
    ),
    "new acc": (
        """
        model = accelerator.prepare(model)
        accelerator = Accelerator()
        model = accelerator.prepare(model)
        """
    ),
    "other acc": (
        """
        model = accelerator.prepare(model)
        model = other_accelerator.prepare(model)
        """
    ),
    "loaders": (
        """
        dl = accelerator.prepare(dl)
        dl = accelerator.prepare(dl)
        for e in x:
          loader = accelerator.prepare(loader)
        """
    ),
    "optimizer": (
        """
        opt = accelerator.prepare(opt)
        model, opt = accelerator.prepare(model, opt)
        """
    ),
    "functions": (
        """
        def a():
          model = accelerator.prepare(model)
        def b():
          model = accelerator.prepare(model)
        """
    ),
    "first epoch": (
        """
        for e in range(3):
          if e == 0:
            model = accelerator.prepare(model)
        """
    ),
    "retry": (
        """
        while True:
          try:
            model = accelerator.prepare(model)
            break
          except RuntimeError:
            pass
        """
    ),
    "handler": (
        """
        try:
          model = accelerator.prepare(model)
        except ValueError:
          model = accelerator.prepare(model)
        """
    ),
    "break": (
        """
        for e in x:
          model = accelerator.prepare(model)
          break
        """
    ),
    "quant": (
        """
        import torch.ao.quantization as q
        m = q.prepare(m)
        m = q.prepare(m)
        """
    ),
    "processor": (
        """
        x = processor.prepare(x)
        x = processor.prepare(x)
        """
    ),
    "del": (
        """
        model = accelerator.prepare(model)
        del model
        model = accelerator.prepare(model)
        """
    ),
    "match": (
        """
        match k:
          case 1:
            model = accelerator.prepare(model)
          case 2:
            model = accelerator.prepare(model)
        """
    ),
    "copy": (
        """
        model = accelerator.prepare(model)
        ema = copy.deepcopy(model)
        ema = accelerator.prepare(ema)
        """
    ),
    "methods": (
        """
        class T:
          def fit(self):
            self.model = self.accelerator.prepare(self.model)
          def test(self):
            self.model = self.accelerator.prepare(self.model)
        """
    ),
}


def uses(text: str) -> Uses:
    return script(textwrap.dedent(PREAMBLE).strip() + "\n" + textwrap.dedent(text).strip()).uses


@pytest.mark.parametrize("name", TWICE)
def test_a_model_that_is_prepared_twice_is_found(name: str) -> None:
    found = uses(TWICE[name]).twice
    assert found
    assert found[0].first.order <= found[0].second.order
    assert "prepare" in found[0].second.text


@pytest.mark.parametrize("name", ONCE)
def test_what_may_be_prepared_once_only_is_not_accused(name: str) -> None:
    assert uses(ONCE[name]).twice == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model = DDP(model)\nmodel = accelerator.prepare(model)", 1),
        ("m = accelerator.prepare(DDP(model))", 1),
        ("m = torch.nn.DataParallel(model)\nm, o = accelerator.prepare(m, o)", 1),
        ("m = torch.compile(DDP(model))\nm = accelerator.prepare(m)", 1),
        ("if many:\n    model = DDP(model)\nelse:\n    model = accelerator.prepare(model)", 0),
        ("m = FSDP(model)\nm = accelerator.prepare(m)", 0),
        ("m = accelerator.prepare(m)\nm = DDP(m)", 0),
        ("DDP(model)\nm = accelerator.prepare(other)", 0),
    ],
)
def test_a_wrapper_before_prepare(text: str, found: int) -> None:
    assert len(uses(text).wrapped) == found


def test_two_cells_of_a_notebook_are_one_script(tmp_path: Path) -> None:
    first = "from accelerate import Accelerator\na = Accelerator()\nm = a.prepare(m)"
    cells = [{"cell_type": "code", "source": source} for source in (first, "m = a.prepare(m)")]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": cells}))
    (found,) = read_script(str(tmp_path / "train.ipynb")).uses.twice
    assert (found.first.where, found.second.where) == ("cell 1, line 3", "cell 2, line 1")
