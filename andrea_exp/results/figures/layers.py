"""What each block is worth: the loss without it, with it and the next swapped, and read out after it."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from andrea_exp.results.figures.panels import Look, arm_lines, finish, grouped, look, panels, seeds
from andrea_exp.results.figures.seen import Seen
from andrea_exp.results.layers import increases_of
from andrea_exp.sweep.plan import column_title

SHOWN = {"skip": "skipped", "swap": "swapped with the next", "lens": "read out after it"}
LINEAR = 0.01  # nats: increases below are on a linear scale, since a swap may also help

Increases = Mapping[str, Sequence[float | None]]


def loss_by_block(seen: Seen) -> Figure | None:
    """Loss increase by block, a panel a column and measure: an arm's mean over seeds, and its range."""
    found = [(run, by) for run in seen.reported if (by := increases_of(run, seen.records))]
    if not found:
        return None
    plan = seen.plan
    names = {
        (column_title(column), measure): ", ".join(filter(None, (column_title(column), text)))
        for column in plan.columns
        for measure, text in SHOWN.items()
    }
    figure, panel_of = panels(list(names.values()), "block", "loss increase (nats a token)", in_a_row=len(SHOWN))
    for (arm, column), own in grouped(found, lambda f: (f[0].cell.arm, column_title(f[0].cell.column))).items():
        for measure in SHOWN:
            _line(panel_of[names[column, measure]], [by[measure] for _, by in own], look(plan.arms.index(arm)))
    for panel in panel_of.values():
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        panel.set_yscale("symlog", linthresh=LINEAR)
    lines = arm_lines(plan, seen.reported, {run.cell.arm for run, _ in found})
    finish(figure, lines, f"mean and range\nof n = {seeds(plan)} seeds")
    return figure


def _line(panel: Axes, each: Sequence[Sequence[float | None]], style: Look) -> None:
    """Blocks count from 1; one that a seed has no number for is left out."""
    by_block = {n: [v for v in values if v is not None] for n, values in enumerate(zip(*each, strict=True), 1)}
    known = {n: values for n, values in by_block.items() if len(values) == len(each)}
    means, least, most = ([of(values) for values in known.values()] for of in (statistics.fmean, min, max))
    panel.plot(list(known), means, lw=1.2, markersize=3.5, **style)
    panel.vlines(list(known), least, most, color=style["color"], lw=0.9)
