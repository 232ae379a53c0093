"""Losses by what a model costs."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from andrea_exp.results.figures.losses import UNITS
from andrea_exp.results.figures.panels import (
    SMALL,
    Look,
    Mark,
    at_top,
    few,
    finish,
    grouped,
    look,
    number,
    panels,
    plain,
    proxy,
    rest,
    seeds,
)
from andrea_exp.results.figures.seen import Seen
from andrea_exp.results.table import TableCell
from andrea_exp.sweep.plan import Plan, column_title

TICKS = (0.1, 0.37, 0.63, 0.9)  # where labels stand on a cost's axis
APART = 1.02  # sizes that differ by less are one
COSTS = {"parameters": "parameters", "flops": "training FLOPs"}


def loss_by_size(seen: Seen) -> Figure | None:
    """Final validation loss, mean and SD over seeds, by parameters and by training FLOPs: where those differ.

    Arms that one number orders are joined by a line, a line a column. Other arms have a line each, over those columns
    that change their size, and a pair of panels for each of the other columns.
    """
    plan = seen.plan
    cells = [c for c in seen.table.cells if c.parameters and c.flops and (c.loss_mean is not None or c.diverged)]
    if not any(_differ(cells, cost) for cost in COSTS):
        return None
    field = _ordering_field(plan)
    grown = list(plan.spec.across) if field else [key for key in plan.spec.across if _grows(cells, key)]
    series = list(dict.fromkeys(column_title(column) or "all arms" for column in plan.columns)) if field else plan.arms
    rests = list(dict.fromkeys(column_title(rest(cell.column, *grown)) for cell in cells))
    names = {(text, cost): f"{text + ': ' if text else ''}by {COSTS[cost]}" for text in rests for cost in COSTS}
    figure, found = panels(list(names.values()), "", UNITS[seen.table.metric], share_x=False)
    marks: dict[str, list[Mark]] = {name: [] for name in found}
    drawn = set()
    if field:
        cells.sort(key=lambda cell: number(plan.spec.compare[cell.arm][field]) or 0.0)
    for cost, text, label, own in _lines(cells, field, grown):
        name, place = names[text, cost], series.index(label)
        marks[name] += _line(found[name], own, cost, look(place), seeds(plan))
        if field and place == 0:
            _name_arms(found[name], own, cost)
        drawn.add(label)
    for (_, cost), name in names.items():
        _cost_axis(found[name], COSTS[cost])
    at_top(found, marks)
    lines = [proxy(label, **look(i)) for i, label in enumerate(series) if label in drawn]
    lines += [proxy("k/n diverged", ls="", marker="o", mfc="none")] * any(marks.values())
    finish(figure, lines, f"mean ± SD\nover n = {seeds(plan)} seeds")
    return figure


def _differ(cells: Sequence[TableCell], cost: str) -> bool:
    sizes = [getattr(cell, cost) for cell in cells]
    return bool(sizes) and max(sizes) > APART * min(sizes)


def _ordering_field(plan: Plan) -> str | None:
    """The field that orders the arms: the first that all of them set, each to a number of its own."""
    arms = list(plan.spec.compare.values())
    for field in arms[0]:
        numbers = [number(arm.get(field)) for arm in arms]
        if None not in numbers and len(set(numbers)) == len(arms) > 1:
            return field
    return None


def _grows(cells: Sequence[TableCell], key: str) -> bool:
    """Whether an arm's size goes with this field of the columns alone."""
    alike = grouped(cells, lambda cell: (cell.arm, repr(rest(cell.column, key))))
    return any(_differ(own, cost) for own in alike.values() for cost in COSTS)


def _lines(
    cells: Sequence[TableCell], field: str | None, grown: Sequence[str]
) -> Iterator[tuple[str, str, str, list[TableCell]]]:
    """Each line's cost, the columns that have panels of their own, its name in the legend, and its cells."""

    def key(cell: TableCell) -> tuple[str, str]:
        return column_title(rest(cell.column, *grown)), (column_title(cell.column) or "all arms") if field else cell.arm

    for (text, label), own in grouped(cells, key).items():
        for cost in COSTS:
            yield cost, text, label, own if field else sorted(own, key=attrgetter(cost))


def _line(panel: Axes, cells: Sequence[TableCell], cost: str, style: Look, n: int) -> list[Mark]:
    """Draws the cells whose seeds are all done; returns what belongs at the top for the others."""
    known = [(getattr(c, cost), c.loss_mean, c.loss_sd or 0.0, c.done) for c in cells if c.loss_mean is not None]
    if known:
        x, mean, sd, done = zip(*known, strict=True)
        panel.errorbar(x, mean, sd, lw=1.1, elinewidth=0.9, capsize=2, markersize=4.5, **style)
        for at in zip(x, mean, done, strict=True):
            if at[2] < n:
                few(panel, *at)
    return [(getattr(c, cost), f"{c.diverged}/{c.done + c.diverged}", style) for c in cells if c.diverged]


def _name_arms(panel: Axes, cells: Sequence[TableCell], cost: str) -> None:
    where: Any = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": SMALL}
    for cell in cells:
        if cell.loss_mean is not None:
            panel.annotate(plain(cell.arm), (getattr(cell, cost), cell.loss_mean), **where)


def _cost_axis(panel: Axes, text: str) -> None:
    """Logarithmic, with four round labels however much or little it spans."""
    panel.set_xlabel(text)
    panel.margins(x=0.12)
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    ticks = [float(f"{low * (high / low) ** share:.1e}") for share in TICKS]
    panel.set_xticks(list(dict.fromkeys(ticks)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
