"""Runs `tests/kernels` in processes of their own: Triton's interpreter must be chosen before Triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(p.name for p in HERE.glob("test_*.py")))
def test_kernels(module: str) -> None:
    """Every test of the module passes, and none is skipped but for want of a GPU, or a second one."""
    run_pytest(module)


def test_a_few_of_each_kind() -> None:
    """The quick form of the above."""
    run_pytest("test_activations.py", "test_norms.py", "-k", "gate_comes_first or any_rank or extreme or no_rows")


def run_pytest(*words: str) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-n", "0", "-p", "no:cacheprovider", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("needs two GPUs" in line or "needs a GPU" in line for line in skips), skips
    assert " passed" in done.stdout or skips
