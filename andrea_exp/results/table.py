"""The ablation table: one object from the roles and the runs, many ways to write it.

Protocol: diverged runs are counted, never averaged; differences to the baseline are paired seed by seed, with
an unadjusted 95% t interval from three seeds on; whatever is not there is said.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text
from scipy import stats

from andrea_exp.config import formula
from andrea_exp.record import Status
from andrea_exp.results.load import runs_frame, select
from andrea_exp.rules import get
from andrea_exp.sweep.plan import Plan, Values, shown

LEAST_SEEDS = 3
SIDE_BY_SIDE = 4  # columns


@dataclass(frozen=True)
class TableCell:
    """One arm in one column: its seeds in numbers."""

    arm: str
    column: Values
    tuned: Values
    planned: int
    done: int
    diverged: int
    kinds: str  # of divergence: "stuck", "non-finite, stuck"
    unfinished: int
    loss_mean: float | None  # in the table's metric, over the seeds, where all of them are done
    loss_sd: float | None
    loss_median: float | None  # with diverged seeds as +inf
    diverged_at: float | None  # median of where diverged seeds ended, of those that ended in a number
    bits_per_byte: float | None
    difference: float | None  # to the baseline, paired by seed
    ci_low: float | None
    ci_high: float | None
    pairs: int
    grad_norm_median: float | None  # diverged runs included, while their gradients are finite
    grad_norm_max: float | None
    tokens_per_s: float | None
    parameters: int | None
    signatures: list[str]


@dataclass(frozen=True)
class AblationTable:
    name: str
    question: str
    baseline: str
    metric: str  # "val_loss", or "bits_per_byte" where tokens differ between runs
    arms: dict[str, dict[str, Any]]  # arm -> what it is: its overrides, its placement's formula
    columns: list[Values]
    cells: list[TableCell]
    notes: list[str]

    def cell(self, arm: str, column: Values) -> TableCell:
        return next(c for c in self.cells if c.arm == arm and c.column == column)

    def _repr_markdown_(self) -> str:
        """How a notebook shows it."""
        return to_markdown(self)


def ablation_table(plan: Plan, records: Path) -> AblationTable:
    """The table of a plan with whatever runs exist."""
    frame = runs_frame(plan, records)
    reported = frame[frame["purpose"] == "report"]
    metric = "bits_per_byte" if _texts_differ(plan) else "val_loss"
    cells = [_cell(plan, reported, arm, column, metric) for arm in plan.arms for column in plan.columns]
    return AblationTable(
        name=plan.name,
        question=plan.spec.question,
        baseline=plan.spec.baseline,
        metric=metric,
        arms={arm: _describe(plan, arm) for arm in plan.arms},
        columns=plan.columns,
        cells=cells,
        notes=_notes(plan, frame, cells),
    )


def _cell(plan: Plan, reported: pd.DataFrame, arm: str, column: Values, metric: str) -> TableCell:
    runs = select(reported, arm, column)
    done, diverged = runs[runs["status"] == Status.done], runs[runs["status"] == Status.diverged]
    clean = len(diverged) == 0 and len(done) > 0
    ended = [*done[metric], *[math.inf] * len(diverged)]
    median = float(pd.Series(ended).median()) if ended else None
    base = select(reported, plan.spec.baseline, column)
    reports = (c for c in plan.cells if c.purpose == "report" and c.arm == arm and c.column == column)
    tuned = next((c.tuned for c in reports), {})
    return TableCell(
        arm=arm,
        column=column,
        tuned=tuned,
        planned=math.prod(len(v) for v in plan.spec.repeat.values()),
        done=len(done),
        diverged=len(diverged),
        kinds=", ".join(sorted(diverged["diverged"].unique())),
        unfinished=len(runs) - len(done) - len(diverged),
        loss_mean=_mean(done[metric]) if clean else None,
        loss_sd=float(done[metric].std()) if clean and len(done) > 1 else None,
        loss_median=None if median is None or math.isinf(median) else median,
        diverged_at=float(diverged[metric].median()) if diverged[metric].notna().any() else None,
        bits_per_byte=_mean(done["bits_per_byte"]) if clean else None,
        **_difference(runs, base, list(plan.spec.repeat), metric, compared=arm != plan.spec.baseline),
        grad_norm_median=_mean(runs["grad_norm_median"]),
        grad_norm_max=_largest(runs["grad_norm_max"]),
        tokens_per_s=_mean(runs["tokens_per_s"]),
        parameters=None if (count := _largest(runs["parameters"])) is None else int(count),
        signatures=list(runs["signature"]),
    )


def _difference(
    runs: pd.DataFrame, base: pd.DataFrame, pair_by: list[str], metric: str, compared: bool
) -> dict[str, Any]:
    """Mean paired difference and its interval; nothing where a seed of either side diverged."""
    none = {"difference": None, "ci_low": None, "ci_high": None, "pairs": 0}
    either = pd.concat([runs["status"], base["status"]])
    if not compared or (either == Status.diverged).any():
        return none
    ended = [f[f["status"] == Status.done] for f in (runs, base)]
    if pair_by:
        pairs = ended[0].merge(ended[1], on=pair_by, suffixes=("", "_base"))
        gaps = (pairs[metric] - pairs[f"{metric}_base"]).to_numpy()
    else:
        gaps = ended[0][metric].to_numpy() - ended[1][metric].to_numpy() if all(map(len, ended)) else []
    if len(gaps) == 0:
        return none
    low, high = paired_interval(gaps)
    return {"difference": float(sum(gaps) / len(gaps)), "ci_low": low, "ci_high": high, "pairs": len(gaps)}


def paired_interval(gaps: Sequence[float]) -> tuple[float | None, float | None]:
    """95% t interval of the mean of paired differences; (None, None) below three pairs."""
    if len(gaps) < LEAST_SEEDS:
        return None, None
    if min(gaps) == max(gaps):  # two arms that are one run
        return float(gaps[0]), float(gaps[0])
    interval = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    return float(interval.low), float(interval.high)


def _mean(values: pd.Series) -> float | None:
    return float(values.mean()) if values.notna().any() else None


def _largest(values: pd.Series) -> float | None:
    return float(values.max()) if values.notna().any() else None


def _describe(plan: Plan, arm: str) -> dict[str, Any]:
    formulas = {formula(cell.config.model) for cell in plan.cells if cell.arm == arm}
    return {"overrides": plan.spec.compare[arm], "formula": formulas.pop() if len(formulas) == 1 else ""}


def _notes(plan: Plan, frame: pd.DataFrame, cells: list[TableCell]) -> list[str]:
    found = {k: {get(c.config, k) for c in plan.cells} for k in ("model.init", "optim.lr", "train.steps")}
    alike = {k: values.pop() for k, values in found.items() if len(values) == 1}
    notes = ["all runs: " + ", ".join(f"{k}={getattr(v, 'name', v)}" for k, v in alike.items())] if alike else []
    if "optim.lr" in alike:
        notes.append("one learning rate for all arms: a description of these runs, no claim about tuned models")
    if _texts_differ(plan):
        notes.append("arms read different texts or tokens: losses are in bits a byte")
    notes += _same_runs(plan) + _tuned_at_an_edge(plan)
    if plan.waiting:
        notes.append(f"{plan.waiting} runs wait for the tuning runs to choose their values")
    unfinished = sum(c.unfinished for c in cells)
    if unfinished:
        counts = frame.loc[~frame["status"].isin(["done", "diverged"]), "status"].value_counts()
        notes.append("not in yet: " + ", ".join(f"{n} {s}" for s, n in counts.items()))
    if any(c.planned < LEAST_SEEDS for c in cells):
        notes.append(f"fewer than {LEAST_SEEDS} seeds: no interval")
    if any(c.diverged for c in cells):
        notes.append("k/n diverged: counted, never averaged; stuck = no better than 0.99 of the unigram model's loss")
    if frame["threads"].nunique() > 1:
        notes.append("runs with different numbers of threads are mixed")
    return notes


def _texts_differ(plan: Plan) -> bool:
    """Whether arms of one column have different data: nats a token compare nothing across tokenizers."""
    texts = ({c.fingerprint for c in plan.cells if c.column == column} for column in plan.columns)
    return any(len(found) > 1 for found in texts)


def _same_runs(plan: Plan) -> list[str]:
    """Arms that are one and the same run in some column."""
    arms_of: dict[str, dict[str, None]] = {}
    for cell in plan.cells:
        arms_of.setdefault(cell.signature, {})[cell.arm] = None
    same = dict.fromkeys(" and ".join(arms) for arms in arms_of.values() if len(arms) > 1)
    return [f"{arms} are the same runs" + (" in some columns" if plan.spec.across else "") for arms in same]


def _tuned_at_an_edge(plan: Plan) -> list[str]:
    """Chosen values at an end of their grid: the best may lie beyond."""
    found: dict[str, None] = {}
    for cell in plan.cells:
        for key, value in cell.tuned.items() if cell.purpose == "report" else ():
            if len(plan.spec.tune[key]) > 1 and value in (plan.spec.tune[key][0], plan.spec.tune[key][-1]):
                where = f"{cell.arm}, {column_title(cell.column)}" if cell.column else cell.arm
                found[f"{where}: {column_title({key: value})} is at the edge of its grid"] = None
    return list(found)


UNITS = {"val_loss": "nats a token", "bits_per_byte": "bits a byte"}


def legend(table: AblationTable) -> str:
    return (
        f"cells: validation loss in {UNITS[table.metric]} ± SD over seeds (n); difference to the baseline, paired by "
        "seed [95% CI]; gradient norm before clipping over logged steps, median (largest)"
    )


def column_title(column: Values) -> str:
    return ", ".join(f"{k.split('.')[-1]}={shown(v)}" for k, v in column.items())


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


def difference_text(cell: TableCell, baseline: str) -> str:
    if cell.difference is None:
        return "baseline" if cell.arm == baseline else ""
    if cell.ci_low is None:
        return f"{cell.difference:+.3f}"
    return f"{cell.difference:+.3f} [{cell.ci_low:+.3f}, {cell.ci_high:+.3f}]"


def grad_norm_text(cell: TableCell) -> str:
    if cell.grad_norm_median is None:
        return ""
    return f"|g| {cell.grad_norm_median:.2f} ({cell.grad_norm_max:.1f})"


def _cell_text(cell: TableCell, baseline: str) -> str:
    tuned = f"at {column_title(cell.tuned)}" if cell.tuned else ""
    lines = (loss_text(cell), difference_text(cell, baseline), grad_norm_text(cell), tuned)
    return "\n".join(line for line in lines if line)


def _grid(table: AblationTable) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row of text an arm: what it is, its parameters, then one entry a column.

    Where there are too many columns to read side by side, they go below each other: one row a column and arm.
    """
    if len(table.columns) > SIDE_BY_SIDE:
        return _long_grid(table)
    head = ["arm", "parameters", *(column_title(c) or "all seeds" for c in table.columns)]
    rows = []
    for arm, what in table.arms.items():
        cells = [table.cell(arm, column) for column in table.columns]
        counts = dict.fromkeys(f"{c.parameters:,}" for c in cells if c.parameters is not None)
        count = " / ".join(counts) or "–"  # one where the columns agree
        rows.append([f"{arm}\n{what['formula']}".strip(), count, *(_cell_text(c, table.baseline) for c in cells)])
    return head, rows


def print_table(table: AblationTable) -> None:
    """On a terminal in its width; elsewhere as wide as the table is."""
    console, rich = Console(), to_rich(table)
    if not console.is_terminal:
        endless = Console(width=10**6)
        console = Console(width=max(80, Measurement.get(endless, endless.options, rich).maximum))
    console.print(rich)


def _long_grid(table: AblationTable) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"{column_title(cell.column)}: {cell.arm}",
            f"{cell.parameters:,}" if cell.parameters is not None else "–",
            _cell_text(cell, table.baseline),
        ]
        for cell in sorted(table.cells, key=lambda c: table.columns.index(c.column))
    ]
    return ["column: arm", "parameters", "all seeds"], rows


def to_rich(table: AblationTable) -> RichTable:
    head, rows = _grid(table)
    rich = RichTable(title=table.question or None, box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for i, title in enumerate(head):
        rich.add_column(Text(title), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        rich.add_row(*map(Text, row), end_section=True)
    rich.caption = Text("\n".join([legend(table), *table.notes]))
    rich.caption_justify = "left"
    return rich


def to_markdown(table: AblationTable) -> str:
    head, rows = _grid(table)

    def line(entries: Sequence[str]) -> str:
        safe = (e.replace("|", "\\|").replace("\n", "<br>") for e in entries)
        return f"| {' | '.join(safe)} |"

    rule = line([":--" if i == 0 else "--:" for i in range(len(head))])
    title = [f"**{table.question}**", ""] if table.question else []
    return "\n".join(
        [*title, line(head), rule, *map(line, rows), "", *(f"- {n}" for n in (legend(table), *table.notes)), ""]
    )


def to_json(table: AblationTable) -> str:
    return json.dumps(asdict(table), indent=2, default=_plain) + "\n"


def to_csv(table: AblationTable) -> str:
    """Long: one line an arm and column, every number unrounded."""
    out = io.StringIO()
    rows = []
    for cell in table.cells:
        values = asdict(cell)
        column, tuned = values.pop("column"), values.pop("tuned")
        values["signatures"] = " ".join(values["signatures"])
        rows.append({"arm": values.pop("arm"), **column, **tuned, **values})
    columns = max(rows, key=len)  # arms that wait for their tuning have no tuned values yet
    writer = csv.DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """JSON for what pandas hands out: numpy scalars."""
    return value.item()
