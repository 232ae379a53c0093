"""What `analysis/` keeps is what its records give: every table and verdict again, byte for byte."""

from pathlib import Path

import pytest

from andrea_exp import ROOT
from andrea_exp.pack import unpack
from andrea_exp.results import ablation_table, plan_of
from andrea_exp.results.claims import judge_all
from andrea_exp.results.claims_view import rows, to_markdown
from andrea_exp.results.formats import FORMATS, markdown_grid
from andrea_exp.results.layout import COLUMNS, overview

ANALYSIS = ROOT / "analysis"
NAMES = sorted(path.name.split(".")[0] for path in (ANALYSIS / "data").glob("*.runs.parquet"))
LARGEST = 10_000_000  # bytes of all packed records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    assert unpack(ANALYSIS / "data", folder)[0] > 0
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_table_comes_back(name: str, records: Path):
    table = ablation_table(*plan_of(name, [f"records={records}"]))
    assert not any(cell.unfinished for cell in table.cells)
    kept = {suffix: (ANALYSIS / "tables" / f"{name}{suffix}").read_text() for suffix in (".md", "-all.md", ".csv")}
    assert FORMATS["markdown"](table, None) == kept[".md"]
    assert FORMATS["markdown"](table, tuple(COLUMNS)) == kept["-all.md"]
    assert FORMATS["csv"](table, None) == kept[".csv"]


def test_the_overview_of_tuned_sweeps_comes_back(records: Path):
    tables = [ablation_table(*plan_of(name, [f"records={records}"])) for name in NAMES]
    tuned = [table for table in tables if any(cell.tuned for cell in table.cells)]
    assert "\n".join([*markdown_grid(*overview(tuned)), ""]) == (ANALYSIS / "tables" / "tuned.md").read_text()
    assert len(tuned) > 1


def test_the_verdicts_come_back(records: Path):
    judged = judge_all([f"records={records}"])
    assert to_markdown(list(rows(judged))) == (ANALYSIS / "tables" / "claims.md").read_text()


def test_the_records_are_small():
    assert sum(path.stat().st_size for path in (ANALYSIS / "data").iterdir()) < LARGEST
