"""Every way to write a table keeps its numbers, whatever the names in it."""

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from by_hand import RECORDS, plan, record, record_arms, strict
from rich.console import Console
from rich.table import Table as RichTable

from andrea_exp.errors import UserError
from andrea_exp.results.formats import print_table, tex, to_csv, to_html, to_json, to_latex, to_markdown, to_rich
from andrea_exp.results.layout import COLUMNS, columns_of, layout
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


def test_columns_side_by_side_stay_within_a_hundred_characters():
    """Two columns fit; four go below each other, as do two with long headings."""
    two, four = plan(across={"optim.warmup_steps": [0, 4]}), plan(across={"optim.warmup_steps": [0, 1, 2, 4]})
    for planned, side_by_side in ((two, True), (four, False)):
        for i, cell in enumerate(planned.cells):
            record(cell, 2.0 + 0.01 * i)
        table = ablation_table(planned, RECORDS)
        lines = printed(table)
        assert max(map(len, lines)) <= 100
        assert sum("warmup_steps=" in line for line in lines) == (1 if side_by_side else 12)


def printed(table: AblationTable, names: Sequence[str] | None = None) -> list[str]:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    parts = [part for part in to_rich(table, names).renderables if isinstance(part, RichTable)]
    console.print(*parts)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


# The flat layout


def tuned_table() -> AblationTable:
    """Every column of the flat layout has something to show; arm `post` diverges once."""
    roles = {"tune": {"optim.lr": [0.1, 0.2, 0.4], "seed": [8, 9, 10]}, "across": {"optim.warmup_steps": [0, 4]}}
    arms = {p: {"model.norm_placement": p} for p in ("pre", "post", "none")}
    told = {"val/loss_start": 5.0, "val/loss_stderr": 0.01, "tokens_per_s": 1000.0, "flops_per_token": 7.0}
    told |= {"grad_norm/first_block": 1e-7, "grad_norm/last_block": 0.5}
    for cell in plan(arms, **roles).cells:
        record(cell, 2.0 if cell.tuned["optim.lr"] == 0.2 else 3.0, **told)
    planned = plan(arms, **roles)
    for i, cell in enumerate(c for c in planned.cells if c.purpose == "report"):
        record(cell, "stuck" if (cell.arm, cell.config.seed) == ("post", 1) else 2.5 + 0.01 * (i % 7), **told)
    return ablation_table(planned, RECORDS)


def test_the_full_table_fits_a_terminal_and_leaves_nothing_out():
    table = tuned_table()
    lines = printed(table, tuple(COLUMNS))
    assert max(map(len, lines)) <= 100
    heads = [line for line in lines if line.strip().startswith("arm")]
    assert len(heads) > 1
    assert all("warmup_steps" in line for line in heads)  # each panel says which row is which
    titles = [title for line in heads for title in re.split(r" {3,}", line.strip())]
    assert [t for t in titles if t not in ("arm", "warmup_steps")] == [c.title for c in COLUMNS.values()]
    assert sum(line.strip().startswith("post") for line in lines) == 2 * len(heads)


def test_a_flat_row_has_its_cells_numbers():
    table = tuned_table()
    (panel, *others), below = layout(table, ["parameters", "flops", "tokens", "tuned", "median", "shared"])
    assert others == []
    head, rows = panel
    assert head == ["arm", "warmup_steps", "parameters", "FLOPs", "tokens", "tuned", "median", "at one rate (n)"]
    assert rows[2] == ["post", "0", "1,234", f"{7.0 * 6 * 4 * 16:.2e}", "384", "lr=0.2", "2.560", "+0.000 (3)"]
    assert "difference where both have the baseline's tuned value" in below[0]
    sensitivity = (3 + 2 + 3) / 3 - 2
    head, rows = layout(table, ["sensitivity", "blocks", "diverged", "runs"])[0][0]
    signatures = " ".join(s[:8] for s in table.cells[2].signatures)
    assert rows[2] == ["post", "0", f"{sensitivity:.3f}", "1.0e-07; 5.0e-01", "1/3", signatures]


def test_a_column_that_is_empty_everywhere_is_left_out():
    head, _ = layout(awkward_table(), ["loss", "tuned", "sensitivity"])[0][0]
    assert head == ["arm", "loss ± SD (n)"]


def test_unknown_columns_are_refused_with_the_nearest():
    assert columns_of(["loss", "p", "loss"]) == ("loss", "p")
    with pytest.raises(UserError, match="did you mean sensitivity"):
        columns_of(["loss", "sensitivty"])


@pytest.mark.parametrize("write", [to_markdown, to_latex, to_html])
def test_readers_formats_show_the_same_numbers(write: Callable[..., str]):
    table = tuned_table()
    text = write(table, ["loss", "difference", "bits"])
    for cell in table.cells:
        if cell.loss_mean is not None:
            assert f"{cell.loss_mean:.3f}" in text
            assert f"{cell.bits_per_byte:.3f}" in text
    assert "1/3 diverged (stuck at 3.200)" in text


# HTML


class Rows(HTMLParser):
    """The entries of each row, and the runs behind it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.runs: list[str | None] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.runs.append(dict(attrs).get("data-runs"))
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def test_html_is_well_formed_and_keeps_odd_names_and_the_runs_behind_each_row():
    table = awkward_table()
    found = Rows(to_html(table))
    assert [row[0] for row in found.rows] == ["arm", "a|b", "c,d\ne", 'say "x"', "gone"]
    assert len({len(row) for row in found.rows}) == 1
    assert found.runs[1:] == [" ".join(cell.signatures) for cell in table.cells]


def test_html_escapes_what_would_be_markup():
    arms = {"<td>&amp;": {"optim.lr": 0.1}, "</table>": {"optim.lr": 0.2}}
    table = record_arms(plan(arms), {arm: [2.0, 2.5, 3.3] for arm in arms})
    assert [row[0] for row in Rows(to_html(table)).rows] == ["arm", *arms]


# LaTeX


def test_latex_has_as_many_entries_in_each_row_whatever_the_names():
    arms = {"100% & more_#1": {"optim.lr": 0.1}, "{x}^2 ~\\y": {"optim.lr": 0.2}, "[b] $": {"optim.lr": 0.3}}
    table = record_arms(plan(arms), {arm: [2.0, 2.5, 3.3] for arm in arms})
    rows = [line for line in to_latex(table, ["loss", "difference"]).splitlines() if line.endswith(r"\\")]
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}
    assert rows[1].startswith(r"100\% \& more\_\#1 &")
    assert rows[3].startswith(r"{[}b] {\char36} &")
    assert "$-$" not in rows[1]
    assert "+0.000" not in rows[2]
    assert "$+$0.000 {[}$+$0.000, $+$0.000]" in rows[2]


def test_a_minus_is_one_and_a_hyphen_stays_one():
    assert tex("-0.255 [-1, +2] 3e-4 post-norm x-1") == "$-$0.255 {[}$-$1, $+$2] 3e-4 post-norm x-1"


COMPILER = shutil.which("pdflatex") or shutil.which("lualatex")


@pytest.mark.skipif(COMPILER is None, reason="no TeX is installed")
@pytest.mark.parametrize("names", [None, tuple(COLUMNS)], ids=["default", "full"])
def test_latex_compiles(names: tuple[str, ...] | None):
    arms = {"100% & more_#1": {"optim.lr": 0.1}, "{x}^2 ~\\y <|>": {"optim.lr": 0.2}, "[b] $": {"optim.lr": 0.3}}
    odd = record_arms(plan(arms), {arm: [2.0, 2.5, 3.3] for arm in arms})
    body = "\n".join(to_latex(table, names) for table in (odd, tuned_table()))
    head = "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    Path("table.tex").write_text(f"{head}{body}\n\\end{{document}}\n")
    command = [str(COMPILER), "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
    assert Path("table.pdf").stat().st_size > 10_000
    assert "Missing character" not in Path("table.log").read_text(errors="replace")
    assert "Overfull \\hbox" not in Path("table.log").read_text(errors="replace")


def test_a_table_waits_for_nothing_that_it_does_not_need():
    """Neither the trainer, which results never import, nor what draws figures and frames."""
    code = "import sys, andrea_exp.results.formats; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "lightning", "andrea_exp.run", "pandas", "matplotlib", "scipy.stats"}
    assert heavy & set(done.stdout.split()) == set()
