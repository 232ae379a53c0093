"""The ways to write the one table: text, Markdown, LaTeX, HTML for readers; CSV and JSON with every number unrounded.

`names` chooses columns of the flat layout; None is the format's own default.
"""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from andrea_exp.results.layout import PAPER, SUPERSCRIPT, WIDTH, flat, flat_legend, footnotes, layout, panels
from andrea_exp.results.published import Published, grid, notes
from andrea_exp.results.table import AblationTable
from andrea_exp.sweep.plan import column_title


def to_rich(table: AblationTable, names: Sequence[str] | None = None) -> Group:
    parts, lines = layout(table, names)
    drawn = [_rich(head, rows) for head, rows in parts]
    drawn[0].title = table.question or None
    return Group(*drawn, *map(Text, lines))


def _rich(head: list[str], rows: list[list[str]]) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for i, title in enumerate(head):
        rich.add_column(Text(title), justify="left" if i == 0 else "right", overflow="fold")
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
    parts, lines = layout(table, names)
    title = [f"**{table.question}**", ""] if table.question else []
    written = [line for panel in parts for line in (*markdown_grid(*panel), "")]
    return "\n".join([*title, *written, *(f"- {line}" for line in lines), ""])


def markdown_grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(entries: Sequence[str]) -> str:
        safe = (e.replace("|", "\\|").replace("\n", "<br>") for e in entries)
        return f"| {' | '.join(safe)} |"

    rule = line([":--" if i == 0 else "--:" for i in range(len(head))])
    return [line(head), rule, *map(line, rows)]


def published_to_rich(table: AblationTable, published: Sequence[Published]) -> Group:
    """Our differences beside those of published tables."""
    return Group(*(_rich(*panel) for panel in panels(*grid(table, published), keys=1)), *map(Text, notes(published)))


def to_latex(table: AblationTable, names: Sequence[str] | None = None) -> str:
    """A float for a paper, by booktabs and graphicx; wider than the line, it is made smaller."""
    parts, lines = layout(table, names or PAPER)
    runs = (f"% {_one_line(c.arm)} {column_title(c.column)}: {' '.join(c.signatures)}" for c in table.cells)
    return "\n".join(
        [
            r"% \usepackage{booktabs,graphicx}; runs behind each row:",
            *runs,
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{tex(table.question or table.name)}}}",
            *(line for panel in parts for line in _tabular(*panel)),
            r"\par\smallskip\raggedright\footnotesize",
            *(tex(line) + r"\par" for line in lines),
            r"\end{table}",
            "",
        ]
    )


def _tabular(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    yield rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
    yield r"\toprule"
    yield " & ".join(map(tex, head)) + r" \\"
    yield r"\midrule"
    yield from (" & ".join(tex(_one_line(entry)) for entry in row) + r" \\" for row in rows)
    yield r"\bottomrule"
    yield r"\end{tabular}}\par\smallskip"


TEX = {
    **{c: f"\\{c}" for c in "&%#_{}"},
    "$": r"{\char36}",  # as \$ it would come from a font that small installations lack
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"${c}$" for c in "|<>+"},
    **{"±": r"$\pm$", "·": r"$\cdot$", "√": r"$\surd$", "¼": r"$\frac14$", "–": "--", "σ": r"$\sigma$", "Φ": r"$\Phi$"},
    "²": "$^2$",
    "[": "{[}",  # not an option of the line's end before it
    **{letter: f"$^{{{chr(ord('a') + i)}}}$" for i, letter in enumerate(SUPERSCRIPT)},
}


def tex(text: str) -> str:
    """Any text as LaTeX shows it, numbers with a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", "".join(TEX.get(c, c) for c in text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def to_html(table: AblationTable, names: Sequence[str] | None = None) -> str:
    """A fragment for a page: the table, and a list of what else a reader must know."""
    lines = [flat_legend(table, names or PAPER), *footnotes(table)]
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"{html_table(table, names or PAPER)}\n<ul>{listed}</ul>\n"


def html_table(table: AblationTable, names: Sequence[str]) -> str:
    """Each row names its runs in `data-runs`."""
    head, rows = flat(table, names)

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
        ]
    )


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
