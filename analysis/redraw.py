"""Redraws what `analysis/` keeps, from the records in `analysis/data/`: tables, claims, notebooks, README's figures.

`make results` runs it. The same records and versions give the same bytes, so `git status` tells what differs.
"""

import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from andrea_exp.pack import unpack
from andrea_exp.results import ablation_table, figures_of, plan_of
from andrea_exp.results.claims import judge_all
from andrea_exp.results.claims_view import rows, to_markdown
from andrea_exp.results.figures import encoded
from andrea_exp.results.formats import FORMATS, markdown_grid
from andrea_exp.results.layout import COLUMNS, overview
from andrea_exp.results.table import AblationTable

HERE = Path(__file__).parent
RECORDS = HERE / "records"  # unpacked here, so that they mix with nobody's own
IN_README = {"demo": ["grad_norm"], "warmup": ["stability"]}


def main() -> None:
    shutil.rmtree(RECORDS, ignore_errors=True)  # nothing from elsewhere, nothing half unpacked
    new, _ = unpack(HERE / "data", RECORDS)
    print(f"{new} runs in {RECORDS}", flush=True)
    names = sorted(path.name.split(".")[0] for path in (HERE / "data").glob("*.runs.parquet"))
    tables = []
    for name in names:
        print(f"table: {name}", flush=True)
        tables.append(redraw_sweep(name))
    tuned = [table for table in tables if any(cell.tuned for cell in table.cells)]
    (HERE / "tables" / "tuned.md").write_text("\n".join([*markdown_grid(*overview(tuned)), ""]))
    found = list(rows(judge_all([f"records={RECORDS}"])))
    (HERE / "tables" / "claims.md").write_text(to_markdown(found))
    for path in sorted(HERE.glob("*.ipynb")):
        if path.stem in ("claims", *names) or path.stem == "gradient_norms":
            print(f"notebook: {path.name}", flush=True)
            run_notebook(path)


def redraw_sweep(name: str) -> AblationTable:
    """A sweep's table, for readers and with every number, and those of its figures that the README shows."""
    plan, records = plan_of(name, [f"records={RECORDS}"])
    table = ablation_table(plan, records)
    (HERE / "tables").mkdir(exist_ok=True)
    (HERE / "tables" / f"{name}.md").write_text(FORMATS["markdown"](table, None))
    (HERE / "tables" / f"{name}-all.md").write_text(FORMATS["markdown"](table, tuple(COLUMNS)))
    (HERE / "tables" / f"{name}.csv").write_text(FORMATS["csv"](table, None))
    if name in IN_README:
        figures = figures_of(plan, records)
        for figure in IN_README[name]:
            (HERE / "figures" / f"{name}_{figure}.png").write_bytes(encoded(figures[figure], "png"))
    return table


def run_notebook(path: Path) -> None:
    """Runs it in place. No times are kept, which would differ every time."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
