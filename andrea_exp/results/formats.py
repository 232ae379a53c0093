"""The ways to write the one table: text, Markdown, LaTeX, HTML for readers; CSV and JSON with every number unrounded.

Two layouts serve readers. The grid has an arm's few most wanted numbers in one entry a column, and stays within 100
characters. The flat one has a row an arm and column, and any of `COLUMNS` side by side, as papers print it.
"""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.results.table import AblationTable, TableCell
from andrea_exp.sweep.plan import column_title

WIDTH = 100  # characters that a table may take side by side
GAP = 3  # between two columns of a terminal's table
UNITS = {"val_loss": "nats a token", "bits_per_byte": "bits a byte"}
SUPERSCRIPT = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖ"  # as many as there are checks, and more


# One number as text


def loss_text(cell: TableCell) -> str:
    n = cell.done + cell.diverged
    if n == 0:
        return "–"
    if cell.diverged:
        at = f" at {cell.diverged_at:.3f}" if cell.diverged_at is not None else ""
        text = f"{cell.diverged}/{n} diverged ({cell.kinds}{at})"
    else:
        spread = f" ± {cell.loss_sd:.3f}" if cell.loss_sd is not None else ""
        text = f"{cell.loss_mean:.3f}{spread} ({n})"
    return text if n == cell.planned else f"{text} of {cell.planned}"


def _difference(cell: TableCell) -> str:
    if cell.difference is None:
        return ""
    if cell.ci_low is None:
        return f"{cell.difference:+.3f}"
    return f"{cell.difference:+.3f} [{cell.ci_low:+.3f}, {cell.ci_high:+.3f}]"


def _p(cell: TableCell) -> str:
    if cell.p_holm is None:
        return ""
    return "<0.001" if cell.p_holm < 0.001 else f"{cell.p_holm:.3f}"


def _grad_norm(cell: TableCell) -> str:
    if cell.grad_norm_median is None:
        return ""
    return f"{cell.grad_norm_median:.2f} ({cell.grad_norm_max:.1f})"


def _blocks(cell: TableCell) -> str:
    if cell.grad_norm_first_block is None or cell.grad_norm_last_block is None:
        return ""
    return f"{cell.grad_norm_first_block:.1e}; {cell.grad_norm_last_block:.1e}"


def _shared(cell: TableCell) -> str:
    return "" if cell.shared_difference is None else f"{cell.shared_difference:+.3f} ({cell.shared_pairs})"


def _median(cell: TableCell) -> str:
    if cell.diverged and cell.loss_median is None:
        return "inf"
    return _number(cell.loss_median, ".3f")


def _diverged(cell: TableCell) -> str:
    n = cell.done + cell.diverged
    return f"{cell.diverged}/{n}" if n else ""


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"


@dataclass(frozen=True)
class Column:
    """One column of the flat layout."""

    title: str
    text: Callable[[TableCell], str]
    meaning: str = ""


COLUMNS = {
    "parameters": Column("parameters", lambda c: _number(c.parameters, ",")),
    "flops": Column("FLOPs", lambda c: _number(c.flops, ".2e"), "FLOPs of a whole run's training"),
    "tokens": Column("tokens", lambda c: f"{c.tokens:,}"),
    "tuned": Column("tuned", lambda c: column_title(c.tuned), "the best value on the tuning seeds"),
    "loss": Column("loss ± SD (n)", loss_text),
    "median": Column("median", _median, "of the loss, a diverged seed as infinite"),
    "difference": Column("difference [95% CI]", _difference),
    "p": Column("p", _p, "paired t test, Holm-adjusted over the arms of a column"),
    "shared": Column("at one rate (n)", _shared, "difference where both have the baseline's tuned value, tuning seeds"),
    "bits": Column("bits/byte", lambda c: _number(c.bits_per_byte, ".3f")),
    "stderr": Column("val. SE", lambda c: _number(c.loss_stderr, ".3f"), "of one run's validation, in nats a token"),
    "grad_norm": Column(
        "|g| (largest)", _grad_norm, "gradient norm before clipping over logged steps, median (largest)"
    ),
    "blocks": Column("|g| first; last block", _blocks, "at the last step"),
    "sensitivity": Column(
        "LR sensitivity",
        lambda c: _number(c.lr_sensitivity, ".3f"),
        "mean over the tuned rates of min(loss, loss at start), less the best, in nats a token",
    ),
    "diverged": Column("diverged", _diverged),
    "speed": Column("tokens/s", lambda c: _number(c.tokens_per_s, ",.0f")),
    "runs": Column("runs", lambda c: " ".join(s[:8] for s in c.signatures), "the signatures' first 8 digits"),
}
PAPER = (
    "parameters",
    "tuned",
    "loss",
    "difference",
    "p",
    "bits",
    "grad_norm",
    "diverged",
)  # what is flat without a choice


def columns_of(names: Sequence[str]) -> tuple[str, ...]:
    """Checks a choice of the flat layout's columns. Raises UserError."""
    for name in names:
        if name not in COLUMNS:
            raise UserError(f"--columns: no column {name}; {did_you_mean(name, COLUMNS)}")
    return tuple(dict.fromkeys(names))


# Marks and notes


def letters(table: AblationTable) -> dict[str, str]:
    """Arm -> the letters of its marks."""
    found = dict.fromkeys(table.arms, "")
    for letter, mark in zip(SUPERSCRIPT, table.marks, strict=False):
        for arm in mark.arms:
            found[arm] += letter
    return found


def footnotes(table: AblationTable) -> list[str]:
    """Reasons of the marks, then what else a reader must know."""
    reasons = (
        f"{letter} {mark.sentence}" if mark.arms else mark.sentence
        for letter, mark in zip(SUPERSCRIPT, table.marks, strict=False)
    )
    return [*reasons, *_sign_notes(table), *table.notes]


def _sign_notes(table: AblationTable) -> Iterator[str]:
    told = {arm: s for arm, s in table.signs.items() if s.cells > 1}
    if told:
        counts = (f"{arm} {s.below}/{s.cells}" + (" (flips)" if s.flips else "") for arm, s in told.items())
        yield f"ends below the baseline in k/n of the settings tried: {', '.join(counts)}"


def legend(table: AblationTable) -> str:
    return (
        f"cells: validation loss in {UNITS[table.metric]} ± SD over seeds (n); difference to the baseline, paired by "
        "seed [unadjusted 95% CI] p, Holm-adjusted over the arms of a column; gradient norm before clipping over "
        "logged steps, median (largest)"
    )


def _flat_legend(table: AblationTable, names: Sequence[str]) -> str:
    told = [
        f"loss: validation, in {UNITS[table.metric]}, SD over n seeds",
        f"difference: to {table.baseline}, paired by seed, interval unadjusted",
    ]
    told += [f"{COLUMNS[n].title}: {COLUMNS[n].meaning}" for n in _filled(table, names) if COLUMNS[n].meaning]
    return "; ".join(told)


# Layouts: headings and rows of text

Grid = tuple[list[str], list[list[str]]]


def _grid(table: AblationTable) -> Grid:
    """One row of text an arm: what it is, its parameters, then one entry a column.

    Where that is too wide to read, columns go below each other: one row a column and arm.
    """
    marks = letters(table)
    head = ["arm", "parameters", *(column_title(c) or "all seeds" for c in table.columns)]
    rows = []
    for arm, what in table.arms.items():
        cells = [table.cell(arm, column) for column in table.columns]
        counts = dict.fromkeys(f"{c.parameters:,}" for c in cells if c.parameters is not None)
        count = " / ".join(counts) or "–"  # one where the columns agree
        name = f"{arm}{marks[arm]}\n{what['formula']}".strip()
        rows.append([name, count, *(_entry(c, table.baseline) for c in cells)])
    narrow = len(table.columns) == 1 or sum(_widths(head, rows)) + GAP * (len(head) - 1) <= WIDTH
    return (head, rows) if narrow else _long_grid(table)


def _long_grid(table: AblationTable) -> Grid:
    rows = [
        [
            f"{column_title(column)}: {arm}{mark}",
            _number(cell.parameters, ",") or "–",
            _entry(cell, table.baseline),
        ]
        for column in table.columns
        for arm, mark in letters(table).items()
        for cell in [table.cell(arm, column)]
    ]
    return ["column: arm", "parameters", "all seeds"], rows


def _entry(cell: TableCell, baseline: str) -> str:
    difference = f"median {_median(cell)}" if cell.diverged else _difference(cell)
    if cell.arm == baseline and not cell.diverged:
        difference = "baseline"
    p = f"p {_p(cell)}".replace("p <", "p<") if _p(cell) else ""
    norm = f"|g| {_grad_norm(cell)}" if _grad_norm(cell) else ""
    tuned = f"at {column_title(cell.tuned)}" if cell.tuned else ""
    lines = (loss_text(cell), f"{difference} {p}".strip(), norm, tuned)
    return "\n".join(line for line in lines if line)


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(len(line) for entry in column for line in entry.split("\n")) for column in zip(head, *rows, strict=True)
    ]


def _filled(table: AblationTable, names: Sequence[str]) -> dict[str, list[str]]:
    """Of the named columns those that have any text."""
    texts = {name: [COLUMNS[name].text(cell) for cell in table.cells] for name in names}
    return {name: found for name, found in texts.items() if any(found)}


def _flat(table: AblationTable, names: Sequence[str]) -> Grid:
    """One row an arm and column; a column of text that is empty everywhere is left out."""
    marks = letters(table)
    across = list(table.columns[0])
    kept = _filled(table, names)
    head = ["arm", *(column_title({k: ""})[:-1] for k in across), *(COLUMNS[n].title for n in kept)]
    rows = []
    for i, cell in enumerate(table.cells):
        where = [column_title({"": v})[1:] for v in cell.column.values()]
        rows.append([cell.arm + marks[cell.arm], *where, *(texts[i] or "–" for texts in kept.values())])
    return head, rows


def _panels(head: list[str], rows: list[list[str]], keys: int, width: int = WIDTH) -> Iterator[Grid]:
    """A wide table as several that fit, each beginning with the first `keys` columns."""
    widths = [w + GAP for w in _widths(head, rows)]
    start = sum(widths[:keys])
    chosen: list[int] = []
    for i in range(keys, len(head)):
        if chosen and start + sum(widths[j] for j in (*chosen, i)) - GAP > width:
            yield _picked(head, rows, [*range(keys), *chosen])
            chosen = []
        chosen.append(i)
    yield _picked(head, rows, [*range(keys), *chosen])


def _picked(head: list[str], rows: list[list[str]], places: Sequence[int]) -> Grid:
    return [head[i] for i in places], [[row[i] for i in places] for row in rows]


def _layout(table: AblationTable, names: Sequence[str] | None) -> tuple[list[Grid], list[str]]:
    """The panels of a table for readers, and the lines below them."""
    if names is None:
        return [_grid(table)], [legend(table), *footnotes(table)]
    head, rows = _flat(table, names)
    panels = list(_panels(head, rows, keys=1 + len(table.columns[0])))
    return panels, [_flat_legend(table, names), *footnotes(table)]


# Formats for readers. `names` chooses columns of the flat layout; None is the format's own default.


def to_rich(table: AblationTable, names: Sequence[str] | None = None) -> Group:
    panels, lines = _layout(table, names)
    drawn = [_rich(head, rows) for head, rows in panels]
    drawn[0].title = table.question or None
    return Group(*drawn, *map(Text, lines))


def _rich(head: list[str], rows: list[list[str]]) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for i, title in enumerate(head):
        rich.add_column(Text(title), justify="left" if i == 0 else "right", no_wrap=True)
    apart = any("\n" in entry for row in rows for entry in row)
    for row in rows:
        rich.add_row(*map(Text, row), end_section=apart)
    return rich


def print_table(table: AblationTable, names: Sequence[str] | None = None) -> None:
    """On a terminal in its width; elsewhere as wide as the table is."""
    console, rich = Console(), to_rich(table, names)
    if not console.is_terminal:
        endless = Console(width=10**6)
        drawn = [part for part in rich.renderables if isinstance(part, RichTable)]
        console = Console(width=max(WIDTH, *(Measurement.get(endless, endless.options, d).maximum for d in drawn)))
    console.print(rich)


def to_markdown(table: AblationTable, names: Sequence[str] | None = None) -> str:
    panels, lines = _layout(table, names)
    title = [f"**{table.question}**", ""] if table.question else []
    written = [line for panel in panels for line in (*_markdown(*panel), "")]
    return "\n".join([*title, *written, *(f"- {line}" for line in lines), ""])


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    def line(entries: Sequence[str]) -> str:
        safe = (e.replace("|", "\\|").replace("\n", "<br>") for e in entries)
        return f"| {' | '.join(safe)} |"

    rule = line([":--" if i == 0 else "--:" for i in range(len(head))])
    return [line(head), rule, *map(line, rows)]


def to_latex(table: AblationTable, names: Sequence[str] | None = None) -> str:
    """A float for a paper, by booktabs and graphicx; wider than the line, it is made smaller."""
    panels, lines = _layout(table, names or PAPER)
    runs = (f"% {_one_line(c.arm)} {column_title(c.column)}: {' '.join(c.signatures)}" for c in table.cells)
    return "\n".join(
        [
            r"% \usepackage{booktabs,graphicx}; runs behind each row:",
            *runs,
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(table.question or table.name)}}}",
            *(line for panel in panels for line in _tabular(*panel)),
            r"\par\smallskip\raggedright\footnotesize",
            *(_tex(line) + r"\par" for line in lines),
            r"\end{table}",
            "",
        ]
    )


def _tabular(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    yield rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
    yield r"\toprule"
    yield " & ".join(map(_tex, head)) + r" \\"
    yield r"\midrule"
    yield from (" & ".join(_tex(_one_line(entry)) for entry in row) + r" \\" for row in rows)
    yield r"\bottomrule"
    yield r"\end{tabular}}\par\smallskip"


TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"${c}$" for c in "|<>+"},
    **{"±": r"$\pm$", "·": r"$\cdot$", "√": r"$\surd$", "¼": r"$\frac14$", "–": "--", "σ": r"$\sigma$", "Φ": r"$\Phi$"},
    "²": "$^2$",
    "[": "{[}",  # not an option of the line's end before it
    **{letter: f"$^{{{chr(ord('a') + i)}}}$" for i, letter in enumerate(SUPERSCRIPT)},
}


def _tex(text: str) -> str:
    """Any text as LaTeX shows it, numbers with a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", "".join(TEX.get(c, c) for c in text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def to_html(table: AblationTable, names: Sequence[str] | None = None) -> str:
    """A fragment for a page; each row names its runs in `data-runs`."""
    chosen = names or PAPER
    head, rows = _flat(table, chosen)
    lines = [_flat_legend(table, chosen), *footnotes(table)]

    def cells(tag: str, entries: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(e)}</{tag}>" for e in entries)

    body = [
        f'<tr data-runs="{" ".join(cell.signatures)}">{cells("th", row[:1])}{cells("td", row[1:])}</tr>'
        for cell, row in zip(table.cells, rows, strict=True)
    ]
    return "\n".join(
        [
            "<table>",
            f"<caption>{html.escape(table.question or table.name)}</caption>",
            f"<thead><tr>{cells('th', head)}</tr></thead>",
            "<tbody>",
            *body,
            "</tbody>",
            "</table>",
            f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>",
            "",
        ]
    )


# Formats for machines: everything, unrounded


def to_json(table: AblationTable) -> str:
    return json.dumps(asdict(table), indent=2, default=_plain) + "\n"


def to_csv(table: AblationTable) -> str:
    """Long: one line an arm and column, every number unrounded."""
    out = io.StringIO()
    marks: dict[str, list[str]] = {arm: [] for arm in table.arms}
    for mark in table.marks:
        for arm in mark.arms or table.arms:
            marks[arm].append(mark.check)
    rows = []
    for cell in table.cells:
        values = asdict(cell)
        column, tuned = values.pop("column"), values.pop("tuned")
        lists = {name: " ".join(values.pop(name)) for name in ("signatures", "tuning_signatures")}
        rows.append(
            {"arm": values.pop("arm"), **column, **tuned, **values, "marks": " ".join(marks[cell.arm]), **lists}
        )
    columns = max(rows, key=len)  # arms that wait for their tuning have no tuned values yet
    writer = csv.DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """JSON for what YAML and pandas hand out: numpy scalars."""
    return value.item()


FORMATS: dict[str, Callable[[AblationTable, Sequence[str] | None], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "html": to_html,
    "csv": lambda table, _: to_csv(table),
    "json": lambda table, _: to_json(table),
}
SUFFIXES = {"md": "markdown", "tex": "latex", "html": "html", "csv": "csv", "json": "json"}
