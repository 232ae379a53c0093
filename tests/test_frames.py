"""The frame of all logged values against one made value by value, from files with whatever crashes leave in them."""

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from by_hand import RECORDS, plan
from pandas.testing import assert_frame_equal

from andrea_exp import bench_read
from andrea_exp.record import read_metrics, run_folder
from andrea_exp.results.frames import metrics_frame
from andrea_exp.sweep.plan import Cell, Plan

pytestmark = pytest.mark.usefixtures("empty_folder")


def line_by_line(folder: Path) -> list[dict[str, Any]]:
    """What read_metrics promises, by Python's own parser and no shortcut."""
    rows: dict[float, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_bytes().split(b"\n") if folder.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def value_by_value(planned: Plan) -> pd.DataFrame:
    rows = []
    for cell in planned.cells:
        for row in line_by_line(run_folder(RECORDS, cell.signature)):
            for name, value in row.items():
                if name not in ("step", "time"):
                    roles = {"label": cell.label, "arm": cell.arm, **cell.column, **cell.tuned, **cell.repeat}
                    rows.append({**roles, "step": row["step"], "metric": name, "value": value})
    return pd.DataFrame(rows).astype({"value": "float64"})


def write(cell: Cell, lines: list[str]) -> Path:
    folder = run_folder(RECORDS, cell.signature)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def some_rows(seed: int) -> list[str]:
    """Rows of different names, null among the values, some steps twice and out of order."""
    pick = random.Random(seed)
    names = ["train/loss", "val/loss", "lr", "tokens", "grad_norm/block_00/mlp"]
    steps = [*range(20), *range(12, 25)]
    return [
        json.dumps(
            {"step": step, "time": pick.random()}
            | {n: pick.choice([None, pick.random(), 7, 1e-300]) for n in pick.sample(names, pick.randrange(6))}
        )
        for step in steps
    ]


@pytest.mark.parametrize(
    "fault",
    ["", '{"step": 30, "train/lo', "\x00\x00", '{"step": 31, "lr": NaN, "val/loss": -Infinity}', "]", "\n\n"],
)
def test_it_is_the_frame_made_value_by_value(fault: str):
    planned = plan(across={"optim.clip": [None, 1.0]})
    for number, cell in enumerate(planned.cells[1:]):
        write(cell, [*some_rows(number), fault, '{"step": 40, "train/loss": 1}'])
    assert_frame_equal(metrics_frame(planned, RECORDS), value_by_value(planned))


def test_without_a_value_the_frame_has_its_columns():
    found = metrics_frame(plan(), RECORDS)
    assert found.empty
    assert list(found.columns)[-3:] == ["step", "metric", "value"]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_torn_anywhere_costs_that_line_alone(cut: int):
    (cell, *_) = plan().cells
    whole = '{"step":2,"train/loss":1.25,"lr":0.003}'
    folder = write(cell, ['{"step":1,"train/loss":2.5}', whole[:cut]])
    assert read_metrics(folder) == line_by_line(folder)
    assert len(read_metrics(folder)) == 1 + (cut == len(whole))


def test_bytes_that_are_no_text_cost_their_line_alone():
    (cell, *_) = plan().cells
    folder = write(cell, [])
    (folder / "metrics.jsonl").write_bytes(b'{"step":1,"a":2}\n{"step":2,"a\xff\xfe":3}\n{"step":3,"a":4}\n')
    assert [row["step"] for row in read_metrics(folder)] == [1, 3]


def test_every_bit_of_a_value_is_kept():
    (cell, *_) = plan().cells
    pick = random.Random(0)
    values = [pick.random() * 10.0 ** pick.randint(-300, 300) for _ in range(2000)] + [5e-324, -0.0, 2**53 + 1]
    folder = write(cell, [json.dumps({"step": i, "x": v}) for i, v in enumerate(values)])
    found = [row["x"] for row in read_metrics(folder)]
    assert found == values
    assert math.copysign(1, found[-2]) == -1


@pytest.mark.parametrize("installed", [True, False])
def test_bench_read_compares_the_same_values(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if installed and importlib.util.find_spec("tbparse") is None:
        pytest.skip("tbparse is not installed")
    for name, value in {"RUNS": 50, "STEPS": 2, "SUBSETS": (1, 2)}.items():
        monkeypatch.setattr(bench_read, name, value)
    monkeypatch.setattr(bench_read, "_alone", lambda work, *arguments: work(*arguments))
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert bench_read.bench_read(as_json=True) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["values"] == 50 * 2 * 5
    assert ("tbparse scaled / frame again" in found) is installed
    assert ("pip install 'andrea-exp[peers]'" in err) is not installed
