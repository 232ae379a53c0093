"""The committed notebook: short, with outputs, and it runs on a tiny sweep."""

import ast
from pathlib import Path

import nbformat
import pytest
from conftest import TINY, andrea
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "analysis").glob("*.ipynb"))
MOST_CELLS, MOST_LINES = 12, 12

SWEEP = """\
# @package _global_
sweep:
  question: Does it run?
  baseline: pre
  compare:
    pre: {model.norm_placement: pre}
    none: {model.norm_placement: none}
  across:
    optim.warmup_steps: [0, 2]
  tune: {}
  repeat:
    seed: [0]
"""


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_is_short_and_shows_its_outputs(path: Path):
    cells = code_cells(path)
    assert len(cells) <= MOST_CELLS
    assert all(len(c.source.splitlines()) <= MOST_LINES for c in cells)
    shown = [c for c in cells if isinstance(ast.parse(c.source.replace("%", "# %", 1)).body[-1], ast.Expr)]
    assert shown
    assert all(c.outputs for c in shown)
    assert not [o for c in cells for o in c.outputs if o.output_type in ("error", "stream")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_on_a_tiny_sweep(path: Path, tmp_path: Path, corpus_path: Path):
    """From the first cell to the last, with only the names of sweep and records changed."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "tiny.yaml").write_text(SWEEP)
    words = [*TINY, f"data.path={corpus_path}"]
    andrea("sweep", "tiny", *words, cwd=tmp_path)
    notebook = nbformat.read(path, as_version=4)
    first = next(c for c in notebook.cells if c.cell_type == "code")
    told = [line for line in first.source.splitlines() if line.startswith("SWEEP, OVERRIDES = ")]
    first.source = first.source.replace(told[0], f'SWEEP, OVERRIDES = "tiny", {words!r}')
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    table = next(c for c in notebook.cells if "ablation_table(" in c.source and c.outputs)
    assert "Does it run?" in table.outputs[0].data["text/markdown"]
