"""The notebooks: short, with outputs wherever there are real runs, and each runs from its first cell to its last."""

import ast
import json
from pathlib import Path

import nbformat
import pytest
from by_hand import RECORDS, filled
from conftest import TINY, andrea
from nbclient import NotebookClient

from andrea_exp.record import LAYERS, run_folder

ANALYSIS = Path(__file__).parents[1] / "analysis"
NOTEBOOKS = sorted(ANALYSIS.glob("*.ipynb"))
MOST_CELLS, MOST_LINES = 12, 12
QUICK = ("activation", "demo")
MARKED = [pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in NOTEBOOKS]

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
# Fewer or smaller runs than a sweep has, where it would take long to write or draw them all.
SMALLER = {
    "init_depth": ["model.n_layers=16,128,512"],
    "specialise": ["train.device=cpu"],
    "warmup": ["train.steps=4", "seed=0,1", "optim.warmup_steps=0,200"],
}


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [c for c in notebook.cells if c.cell_type == "code"]


def setting(notebook: nbformat.NotebookNode) -> tuple[nbformat.NotebookNode, str]:
    """The cell that names the records, and its line that does."""
    first = code_cells(notebook)[0]
    (line,) = (line for line in first.source.splitlines() if "OVERRIDES = " in line)
    return first, line


def sweep_of(path: Path) -> str | None:
    """The sweep that a notebook is about; None for that of all claims."""
    names = setting(nbformat.read(path, as_version=4))[1].split(" = ")
    return ast.literal_eval(names[1])[0] if names[0] == "SWEEP, OVERRIDES" else None


def run(path: Path, sweep: str | None, words: list[str]) -> nbformat.NotebookNode:
    """Executes a notebook in the current folder, with only the names of sweep and records changed."""
    notebook = nbformat.read(path, as_version=4)
    first, line = setting(notebook)
    told = f"SWEEP, OVERRIDES = {sweep!r}, {words!r}" if sweep else f"OVERRIDES = {words!r}"
    first.source = first.source.replace(line, told)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(Path.cwd())}}).execute()
    return notebook


def shows(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that end in something to show."""
    cells = code_cells(notebook)
    return [c for c in cells if isinstance(ast.parse(c.source.replace("%", "# %", 1)).body[-1], ast.Expr)]


def check_outputs(notebook: nbformat.NotebookNode) -> None:
    assert shows(notebook)
    assert all(c.outputs for c in shows(notebook))
    assert not [o for c in code_cells(notebook) for o in c.outputs if o.output_type in ("error", "stream")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_short_and_shows_what_real_runs_gave(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert len(code_cells(notebook)) <= MOST_CELLS
    assert all(len(c.source.splitlines()) <= MOST_LINES for c in code_cells(notebook))
    sweep = sweep_of(path)
    if sweep is None or (ANALYSIS / "data" / f"{sweep}.runs.parquet").exists():
        check_outputs(notebook)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("path", MARKED, ids=lambda p: p.stem)
def test_it_runs_on_its_sweeps_roles(path: Path):
    """Records written by hand, since only what reads them is in question."""
    sweep = sweep_of(path)
    words = SMALLER.get(sweep or "", ["train.steps=4"])
    planned = filled(sweep or "residual", *words)
    if sweep == "specialise":
        for cell in planned.cells:
            (run_folder(RECORDS, cell.signature) / LAYERS).write_text(json.dumps(layers(cell.config.model.n_layers)))
    check_outputs(run(path, sweep, ["records=records", *words] if sweep else ["records=records"]))


def layers(blocks: int) -> dict[str, object]:
    worse = [2.0 + 0.1 * b for b in range(blocks)]
    without = {"attn": worse, "mlp": worse}
    return {"loss": 2.0, "lens": [3.0, *worse], "skipped": worse, "swapped": worse[1:], "without": without}


@pytest.mark.usefixtures("empty_folder")
def test_the_demos_runs_on_a_sweep_that_was_trained(corpus_path: Path):
    Path("sweeps").mkdir()
    Path("sweeps/tiny.yaml").write_text(SWEEP)
    words = [*TINY, f"data.path={corpus_path}"]
    andrea("sweep", "tiny", *words, cwd=Path())
    notebook = run(ANALYSIS / "demo.ipynb", "tiny", words)
    check_outputs(notebook)
    table = next(c for c in notebook.cells if "ablation_table(" in c.source and c.outputs)
    assert "Does it run?" in table.outputs[0].data["text/markdown"]
