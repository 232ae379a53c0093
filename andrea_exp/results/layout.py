"""A table as rows of text: one number each, what is said below, and two layouts for readers.

The grid has an arm's few most wanted numbers in one entry a column, and stays within 100 characters. The flat layout
has a row an arm and column, and any of `COLUMNS` side by side, as papers print it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.results.table import AblationTable, TableCell
from andrea_exp.sweep.plan import column_title

HUGE = 1e5
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
    return f"{_size(cell.grad_norm_median, 2)} ({_size(cell.grad_norm_max, 1)})"


def _size(value: float | None, places: int) -> str:
    """With a few places; what is huge in powers of ten."""
    return _number(value, f".{places}f" if value is None or value < HUGE else ".1e")


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


def flat_legend(table: AblationTable, names: Sequence[str]) -> str:
    told = [
        f"loss: validation, in {UNITS[table.metric]}, SD over n seeds",
        f"difference: to {table.baseline}, paired by seed, interval unadjusted",
    ]
    told += [f"{COLUMNS[n].title}: {COLUMNS[n].meaning}" for n in _filled(table, names) if COLUMNS[n].meaning]
    return "; ".join(told)


# Layouts: headings and rows of text

Grid = tuple[list[str], list[list[str]]]


def wide_grid(table: AblationTable) -> Grid:
    """One row of text an arm: what it is, its parameters, then one entry a column."""
    marks = letters(table)
    head = ["arm", "parameters", *(column_title(c) or "all seeds" for c in table.columns)]
    rows = []
    for arm, what in table.arms.items():
        cells = [table.cell(arm, column) for column in table.columns]
        counts = dict.fromkeys(f"{c.parameters:,}" for c in cells if c.parameters is not None)
        count = " / ".join(counts) or "–"  # one where the columns agree
        name = f"{arm}{marks[arm]}\n{what['formula']}".strip()
        rows.append([name, count, *(_entry(c, table.baseline) for c in cells)])
    return head, rows


def _grid(table: AblationTable) -> Grid:
    """The wide grid; where that is too wide to read, columns go below each other: one row a column and arm."""
    head, rows = wide_grid(table)
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


def flat(table: AblationTable, names: Sequence[str]) -> Grid:
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


OVERVIEW = ("parameters", "tuned", "loss", "difference", "p")


def overview(tables: Sequence[AblationTable]) -> Grid:
    """Several sweeps' arms below each other; a star is on arms that their own table marks as not fair."""
    rows = [
        [table.name, cell.arm + "*" * bool(letters(table)[cell.arm]), *(COLUMNS[n].text(cell) or "–" for n in OVERVIEW)]
        for table in tables
        for cell in table.cells
    ]
    return ["sweep", "arm", *(COLUMNS[n].title for n in OVERVIEW)], rows


def panels(head: list[str], rows: list[list[str]], keys: int, width: int = WIDTH) -> Iterator[Grid]:
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


def layout(table: AblationTable, names: Sequence[str] | None) -> tuple[list[Grid], list[str]]:
    """The panels of a table for readers, and the lines below them."""
    if names is None:
        return [_grid(table)], [legend(table), *footnotes(table)]
    head, rows = flat(table, names)
    parts = list(panels(head, rows, keys=1 + len(table.columns[0])))
    return parts, [flat_legend(table, names), *footnotes(table)]
