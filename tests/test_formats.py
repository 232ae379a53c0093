"""Every way to write a table keeps its numbers, whatever the names in it."""

import io

import pandas as pd
import pytest
from by_hand import RECORDS, plan, record, record_arms, strict

from andrea_exp.results.formats import print_table, to_csv, to_json, to_markdown
from andrea_exp.results.table import AblationTable, ablation_table

pytestmark = pytest.mark.usefixtures("empty_folder")


def awkward_table() -> AblationTable:
    """Values without a short decimal form, odd names, a diverged arm, a missing one."""
    arms = {
        "a|b": {"optim.lr": 0.1},
        "c,d\ne": {"optim.lr": 0.2},
        'say "x"': {"optim.lr": 0.3},
        "gone": {"optim.lr": 1},
    }
    thirds: list[float | str | None] = [1 / 3, 2 / 3, 10 / 3]
    return record_arms(plan(arms), {"a|b": thirds, "c,d\ne": [0.1 + 0.2, 1e-17, 2.0], 'say "x"': ["non-finite"] * 3})


def test_csv_keeps_every_number_exactly():
    table = awkward_table()
    frame = pd.read_csv(io.StringIO(to_csv(table)), float_precision="round_trip")
    assert list(frame["arm"]) == [c.arm for c in table.cells]
    for name in ("loss_mean", "loss_sd", "loss_median", "difference", "ci_low", "ci_high", "grad_norm_max"):
        found = [None if pd.isna(v) else float(v) for v in frame[name]]
        assert found == [getattr(c, name) for c in table.cells], name
    assert [s.split() for s in frame["signatures"]] == [c.signatures for c in table.cells]


def test_json_keeps_every_number_exactly_and_is_strict():
    table = awkward_table()
    parsed = strict(to_json(table))
    for cell, found in zip(table.cells, parsed["cells"], strict=True):
        assert {k: found[k] for k in ("arm", "loss_mean", "difference", "ci_low", "kinds", "signatures")} == {
            k: getattr(cell, k) for k in ("arm", "loss_mean", "difference", "ci_low", "kinds", "signatures")
        }
    assert parsed["baseline"] == "a|b"


def test_markdown_is_one_table_whatever_the_names():
    lines = to_markdown(awkward_table()).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 4  # heading, rule, arms
    assert {row.replace("\\|", "").count("|") for row in rows} == {4}
    assert "a\\|b" in rows[2]


def test_a_table_of_many_columns_is_printed_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    planned = plan(across={"optim.warmup_steps": list(range(14))})
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0 + i)
    print_table(ablation_table(planned, RECORDS))
    out = capsys.readouterr().out
    assert [w for w in range(14) if f"warmup_steps={w}" not in out] == []
    assert out.count(" ± ") >= 3 * 14
    assert "…" not in out
