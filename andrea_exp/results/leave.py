"""What a finished sweep leaves to read: table, figures and their page in one folder, and where to look next."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from andrea_exp.results.formats import FORMATS, SUFFIXES, print_table
from andrea_exp.results.table import ablation_table
from andrea_exp.sweep.plan import AD_HOC, Plan


def leave_results(plan: Plan, records: Path, overrides: Sequence[str], console: Console) -> Path:
    """Prints the table, writes it in every format beside the figures and the page, and returns their folder."""
    words = [plan.name] if plan.name != AD_HOC else []
    words += [o for o in overrides if not o.startswith("sweeps=")] or ["seed=0"] * (not words)
    table = ablation_table(plan, records)
    folder = records / "tables" / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, name in SUFFIXES.items():
        (folder / f"table.{suffix}").write_text(FORMATS[name](table, None))
    if any(cell.done + cell.diverged for cell in table.cells):
        from andrea_exp.results.figures import figures_of, save_figures
        from andrea_exp.results.page import page_of

        figures = figures_of(plan, records)
        save_figures(figures, folder)
        (folder / "report.html").write_text(page_of(plan, records, words, figures), encoding="utf-8")
    print_table(table)
    for text in (
        f"tables, figures and report.html: {folder}/",
        f"TensorBoard: andrea-exp tensorboard {shlex.join(words)}",
    ):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    return folder
