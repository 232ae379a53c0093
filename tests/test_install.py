"""A wheel carries conf/ and sweeps/ and works from any folder."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_malicious_releases_are_not_installed():
    """Lightning 2.6.2 and 2.6.3 were (Lightning-AI/pytorch-lightning 21691)."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (lightning,) = (Requirement(r).specifier for r in requires if Requirement(r).name == "lightning")
    assert not any(lightning.contains(bad) for bad in ("2.6.2", "2.6.3"))
    assert lightning.contains(metadata.version("lightning"))


@pytest.mark.slow
def test_wheel_works_from_any_folder(tmp_path: Path):
    """Built, unpacked and run away from the checkout: its own configs are found, not the checkout's."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([*pip, *build], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, cwd=tmp_path)

    code = "import andrea_exp; from andrea_exp.sweep.plan import plan_sweep as p; "
    code += "print(andrea_exp.ROOT, len(p(['sweeps=demo']).cells))"
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    environment = {"PYTHONPATH": str(target), "PATH": ""}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=empty, env=environment
    )
    assert said.stdout.split() == [str(target / "andrea_exp"), "24"]
