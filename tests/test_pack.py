"""Packed records: small, and everything that results read comes back from them."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from by_hand import RECORDS, plan, record, write_metrics
from conftest import TINY, andrea

from andrea_exp.errors import UserError
from andrea_exp.pack import DOCUMENTS, PLAIN, pack, unpack
from andrea_exp.record import open_run, read_json, read_metrics, write_json
from andrea_exp.results.figures import encoded, figures_of
from andrea_exp.results.formats import to_json
from andrea_exp.results.table import ablation_table
from andrea_exp.sweep.plan import Cell, Plan

pytestmark = pytest.mark.usefixtures("empty_folder")
PACKED, ELSEWHERE = Path("packed"), Path("elsewhere")


def write_run(cell: Cell, outcome: float | str) -> None:
    open_run(RECORDS, cell.config, cell.fingerprint)
    record(cell, outcome)


def recorded(dies_at: int | None = None) -> Plan:
    planned = plan()
    for cell in planned.cells:
        write_run(cell, "non-finite" if cell.arm == "none" else 2.0 + cell.config.seed)
    write_metrics(planned, dies_at=dies_at)
    return planned


def rows_of(planned: Plan, records: Path) -> list[list[dict[str, float]]]:
    return [read_metrics(records / "runs" / cell.signature) for cell in planned.cells]


def test_a_table_and_its_figures_come_back():
    planned = recorded()
    _, left_out = pack(planned, RECORDS, PACKED)
    assert left_out == 0
    assert unpack(PACKED, ELSEWHERE) == (len(planned.cells), 0)
    assert to_json(ablation_table(planned, ELSEWHERE)) == to_json(ablation_table(planned, RECORDS))
    drawn, again = figures_of(planned, RECORDS), figures_of(planned, ELSEWHERE)
    assert {name: encoded(figure, "svg") for name, figure in again.items()} == {
        name: encoded(figure, "svg") for name, figure in drawn.items()
    }


@pytest.mark.parametrize("dies_at", [None, 4, 1])
def test_each_step_keeps_its_totals_and_the_ends_keep_all(dies_at: int | None):
    planned = recorded(dies_at)
    pack(planned, RECORDS, PACKED)
    unpack(PACKED, ELSEWHERE)
    for full, thin in zip(rows_of(planned, RECORDS), rows_of(planned, ELSEWHERE), strict=True):
        assert [full[0], full[1], full[-1]] == [thin[0], thin[1], thin[-1]]
        assert [{k: v for k, v in row.items() if k in ("step", *PLAIN)} for row in full[2:-1]] == thin[2:-1]


def test_the_same_records_give_the_same_bytes():
    planned = recorded(4)
    first = [path.read_bytes() for path in pack(planned, RECORDS, PACKED)[0]]
    unpack(PACKED, ELSEWHERE)
    assert [path.read_bytes() for path in pack(planned, RECORDS, PACKED)[0]] == first
    assert [path.read_bytes() for path in pack(planned, ELSEWHERE, Path("again"))[0]] == first


def test_what_has_not_ended_is_left_out_and_what_is_there_stays():
    planned = plan()
    with pytest.raises(UserError, match="no finished runs"):
        pack(planned, RECORDS, PACKED)
    write_run(planned.cells[0], 2.0)
    assert pack(planned, RECORDS, PACKED)[1] == len(planned.cells) - 1
    write_run(planned.cells[0], 3.0)
    assert unpack(PACKED, RECORDS) == (0, 1)
    assert json.loads((RECORDS / "runs" / planned.cells[0].signature / "summary.json").read_text())["val/loss"] == 3.0


def test_what_was_half_unpacked_is_mended_and_what_came_later_is_added():
    planned = recorded()
    pack(planned, RECORDS, PACKED)
    unpack(PACKED, ELSEWHERE)
    half, failed, older = (ELSEWHERE / "runs" / cell.signature for cell in planned.cells[:3])
    (half / "summary.json").unlink()
    (half / "metrics.jsonl").write_text("")
    write_json(failed / "summary.json", {"status": "failed", "reason": "by hand"})
    write_json(RECORDS / "runs" / older.name / "layers.json", {"loss": 1.0})  # measured after it was published
    pack(planned, RECORDS, PACKED)
    assert unpack(PACKED, ELSEWHERE) == (2, len(planned.cells) - 2)
    assert rows_of(planned, ELSEWHERE)[0]
    for folder in (half, failed, older):
        for name in DOCUMENTS:
            assert read_json(folder / f"{name}.json") == read_json(RECORDS / "runs" / folder.name / f"{name}.json")


def test_a_pack_that_would_lose_runs_is_refused():
    planned = recorded()
    (runs, _), _ = pack(planned, RECORDS, PACKED)
    before = runs.read_bytes()
    shutil.rmtree(RECORDS / "runs" / planned.cells[0].signature)
    with pytest.raises(UserError, match="holds 1 runs that would be lost"):
        pack(planned, RECORDS, PACKED)
    assert runs.read_bytes() == before
    unpack(PACKED, RECORDS)
    pack(planned, RECORDS, PACKED)
    assert runs.read_bytes() == before


def test_a_run_under_another_signature_is_refused():
    planned = recorded()
    (path, _), _ = pack(planned, RECORDS, PACKED)
    table = pq.read_table(path)
    names = table["signature"].to_pylist()
    pq.write_table(table.set_column(0, "signature", pa.array([names[1], names[0], *names[2:]])), path)
    with pytest.raises(UserError, match=f"{names[1]} is not the run that its signature says"):
        unpack(PACKED, ELSEWHERE)
    assert not ELSEWHERE.exists()


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense"])
def test_a_broken_file_is_named(content: bytes):
    PACKED.mkdir()
    (PACKED / "x.runs.parquet").write_bytes(content)
    (PACKED / "x.metrics.parquet").write_bytes(content)
    with pytest.raises(UserError, match="not a file that pack wrote"):
        unpack(PACKED, ELSEWHERE)
    with pytest.raises(UserError, match="neither"):
        unpack(ELSEWHERE, ELSEWHERE)


def test_an_unpacked_sweep_is_done(corpus_path: Path):
    """The command that made a sweep finds nothing to run in records that were unpacked."""
    words = ["seed=0,1", *TINY, f"data.path={corpus_path}"]
    andrea("sweep", *words, cwd=Path())
    andrea("pack", *words, "--to", "packed", cwd=Path())
    shutil.rmtree("records/runs")
    said = andrea("unpack", "packed", cwd=Path()).stdout
    assert "2 runs unpacked" in said
    andrea("sweep", *words, cwd=Path())
    assert not list(Path("records/runs").glob("*/weights.pt"))
