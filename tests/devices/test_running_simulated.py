"""Scripts that know nothing of ckptfix, run by it on simulated devices whose links are broken."""

from pathlib import Path

import pytest

from tests.simulated import requires_simulator
from tests.simulated.processes import run_simulated

pytestmark = [pytest.mark.slow, requires_simulator]

SCRIPT = """
import sys
import torch
from transformers import Qwen2ForCausalLM
from tests.simulated.models import generated
model = Qwen2ForCausalLM.from_pretrained(sys.argv[1], device_map=eval(sys.argv[2])).eval()
print(generated(model).tolist())
"""
BROKEN = {
    (source, destination): "zeros"
    for source in range(2)
    for destination in range(2)
    if source != destination
}


def printed(folder: Path, device_map: str, *guard: str, **environment: str) -> str:
    return run_simulated(
        [*guard, str(folder / "script.py"), str(folder / "model"), device_map],
        2,
        faults=BROKEN,
        environment=environment,
    )


def test_a_script_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run_simulated(
        "from tests.simulated.models import qwen2; "
        f"qwen2().save_pretrained({str(tmp_path / 'model')!r})",
        2,
    )
    right = printed(tmp_path, "{'': 0}")
    assert printed(tmp_path, "'auto'") != right
    assert (
        printed(tmp_path, "'auto'", "-m", "ckptfix", "run", CKPTFIX_SAFE_TRANSFERS="always")
        == right
    )
    assert (
        printed(tmp_path, "'auto'", "-m", "ckptfix", "run", CKPTFIX_SAFE_TRANSFERS="never") != right
    )
    assert (
        printed(tmp_path, "'auto'", "-m", "ckptfix", "run", XDG_CACHE_HOME=str(tmp_path / "cache"))
        == right
    )
