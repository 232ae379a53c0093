"""What all figures share: panels in rows, an arm's colour and marker, one legend beside them, counts of seeds."""

import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from andrea_exp.record import Status
from andrea_exp.results.load import Run
from andrea_exp.style import COLOURS, STYLE
from andrea_exp.sweep.plan import Plan, Values, column_title

PANELS_IN_A_ROW = 4
# Inches: of a panel, of one that is alone in its row, and around them.
WIDTH, HEIGHT = 2.6, 2.0
LONE_WIDTH, LONE_HEIGHT = 3.8, 2.7
GAP, PAD, LINE = 0.3, 0.08, 0.15
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")  # one more than colours: 72 pairs before any comes again
# How many times its lowest an axis' highest value is at most -> what is labelled beside powers of ten.
BETWEEN: dict[str, dict[int, tuple[float, ...]]] = {
    "x": {300: (1.0, 2.0, 5.0)},
    "y": {30: (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0), 300: (1.0, 2.0, 5.0)},
}
SMALL = 7
TOP_ROW = 0.065  # of a panel's height
TITLE_WIDTH = 38  # letters of that size across a panel

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Look = dict[str, Any]
Mark = tuple[float, str, Look]  # x, text, look of what stands at a panel's top edge


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order in which they come."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def rest(values: Values, *without: str) -> Values:
    return {key: value for key, value in values.items() if key not in without}


def titles(plan: Plan, *without: str) -> list[str]:
    """Of the panels of a plan's columns, with some of their fields left out."""
    return list(dict.fromkeys(column_title(rest(column, *without)) for column in plan.columns))


def number(value: object) -> float | None:
    """A config value as a number, also one that is written as a fraction; None where it is none."""
    try:
        return float(Fraction(str(value)))
    except (ValueError, ZeroDivisionError):
        return None


def look(place: int) -> Look:
    """Colour and marker of whatever is drawn in this place of the legend."""
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def plain(text: str) -> str:
    """Text that matplotlib takes as it stands: between two dollars it would read formulas."""
    return text.replace("$", r"\$")


def seeds(plan: Plan) -> int:
    return math.prod(map(len, plan.spec.repeat.values()))


def panels(
    names: Sequence[str], x: str, y: str, in_a_row: int = PANELS_IN_A_ROW, share_x: bool = True
) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel a name, a few in a row, on one y axis. `finish` lays it out."""
    across = min(in_a_row, len(names))
    down = -(-len(names) // across)
    with mpl.rc_context(STYLE):
        figure = Figure()
        grid = figure.subplots(down, across, squeeze=False, sharey=True, sharex=share_x)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    found = dict(zip(names, grid.flat, strict=False))
    for place, (name, panel) in enumerate(found.items()):
        tell(panel, name, [])
        lowest = place + across >= len(names)
        panel.tick_params(labelsize=8, labelbottom=lowest or not share_x)
        panel.set_xlabel(x if lowest else "")
    for first in grid[:, 0]:
        first.set_ylabel(y)
    return figure, found


def tell(panel: Axes, name: str, remarks: Sequence[str]) -> None:
    """A panel's title: its column, and below it what must be said of its seeds."""
    lines = [line for text in (name, "; ".join(remarks)) for line in textwrap.wrap(text, TITLE_WIDTH)]
    panel.set_title(plain("\n".join(lines)), fontsize=SMALL + 1, loc="left", y=1.0)


def count(runs: Sequence[Run], planned: int) -> str:
    """What must be said of the seeds behind an arm: k/n diverged, or that some are not in yet."""
    ended = sum(run.status.finished for run in runs)
    diverged = sum(run.status is Status.diverged for run in runs)
    if diverged:
        return f"{diverged}/{ended} diverged"
    return "" if ended == planned else f"n = {ended} of {planned}"


def tell_counts(plan: Plan, runs: Sequence[Run], found: Mapping[str, Axes]) -> None:
    """Writes into each panel's title which of its arms lack seeds, where there is more than one panel."""
    places = grouped(runs, lambda run: (column_title(run.cell.column), run.cell.arm))
    for name, panel in found.items():
        counts = [(arm, count(places.get((name, arm), []), seeds(plan))) for arm in plan.arms]
        if len(found) > 1:
            tell(panel, name, [f"{arm} {text}" for arm, text in counts if text])


def arm_lines(plan: Plan, runs: Sequence[Run], shown: Iterable[str], marker: bool = True) -> list[Line2D]:
    """A legend's lines for those arms that a figure shows, with their counts of seeds over all panels."""
    own, wanted = grouped(runs, lambda run: run.cell.arm), set(shown)
    lines = []
    for place, arm in enumerate(plan.arms):
        if arm in wanted:
            text = count(own.get(arm, []), seeds(plan) * len(plan.columns))
            style = look(place) if marker else {"color": look(place)["color"]}
            lines.append(proxy(f"{arm}: {text}" if text else arm, **style))
    return lines


def proxy(text: str, **style: Any) -> Line2D:
    """A line that stands only in a legend."""
    return Line2D([], [], label=plain(text), **{"color": "black", "markersize": 5, "lw": 1.2, **style})


def logarithmic(panel: Axes, axis: str) -> None:
    """Makes "x" or "y" logarithmic, with labels at powers of ten, and between them where there are few of those."""
    panel.set(**{f"{axis}scale": "log"})
    low, high = panel.get_xlim() if axis == "x" else panel.get_ylim()
    own = panel.xaxis if axis == "x" else panel.yaxis
    between = next((subs for wide, subs in BETWEEN[axis].items() if high < wide * low), (1.0,))
    own.set_major_locator(LogLocator(subs=between))
    own.set_minor_locator(NullLocator())
    if len(between) > 1:
        own.set_major_formatter("{x:g}")


def finish(figure: Figure, lines: Sequence[Line2D], title: str) -> None:
    """Lays a figure out, panels of one size in rows, and puts one legend beside them, where it covers nothing.

    In inches and by hand: matplotlib's own layouts measure every label of every panel at every drawing.
    """
    with mpl.rc_context(STYLE):
        labels = [str(line.get_label()) for line in lines]
        where: Any = {"loc": "upper left", "alignment": "left", "frameon": False, "borderaxespad": 0}
        made = figure.legend(lines, labels, title=plain(title), fontsize=8, title_fontsize=8, **where)
    legend_width, legend_height = (size / figure.dpi for size in made.get_window_extent().size)
    grid = figure.axes[0].get_gridspec()
    assert grid is not None
    _place(figure, grid.nrows, grid.ncols, 1.0, legend_width, legend_height)
    left = PAD + _left(figure.axes[0])  # measured at its true size
    end = _place(figure, grid.nrows, grid.ncols, left, legend_width, legend_height)
    made.set_bbox_to_anchor((end, 1 - PAD / figure.get_figheight()), figure.transFigure)


def _place(figure: Figure, rows: int, columns: int, left: float, legend_width: float, legend_height: float) -> float:
    """Sets the figure's size and its panels' places; returns where the legend begins, as a share of the width."""
    width, height = (WIDTH, HEIGHT) if columns > 1 else (LONE_WIDTH, LONE_HEIGHT)
    first, last = figure.axes[0], figure.axes[-1 if rows == 1 else -columns]
    head = LINE * max(len(panel.get_title("left").splitlines()) for panel in figure.axes) + PAD
    foot = LINE * (1 + len(last.get_xlabel().splitlines())) + 2 * PAD
    labelled = first.xaxis.get_tick_params()["labelbottom"]  # of rows above the last
    between = head + PAD + LINE * (labelled + bool(first.get_xlabel())) + PAD * bool(first.get_xlabel())
    right = left + columns * width + (columns - 1) * GAP
    inside = rows * height + (rows - 1) * between
    w, h = right + GAP + legend_width + PAD, max(head + inside + foot, legend_height + 2 * PAD)
    figure.set_size_inches(w, h)
    top = 1 - head / h
    figure.subplots_adjust(left / w, top - inside / h, right / w, top, GAP / width, between / height)
    return (right + GAP) / w


def _left(panel: Axes) -> float:
    """Inches that labels take to the left of a panel."""
    box = panel.get_tightbbox()
    return 0.0 if box is None else float(panel.bbox.x0 - box.x0) / panel.figure.dpi


def few(panel: Axes, x: float, y: float, n: int) -> None:
    """Writes a point's own n beside it, where it has fewer seeds than the figure says."""
    where: Any = {"xytext": (3, 4), "textcoords": "offset points", "fontsize": SMALL - 1}
    panel.annotate(f"n = {n}", (x, y), **where)


def at_top(found: Mapping[str, Axes], marks: Mapping[str, Sequence[Mark]]) -> None:
    """Hollow markers, each with its text, at the top edge of panels, above all else that is drawn; a row a look."""
    rows = {name: list(dict.fromkeys(map(_look_of, own))) for name, own in marks.items()}
    most = max(map(len, rows.values()), default=0)
    if most:
        panel = next(iter(found.values()))
        scale = panel.transScale.transform
        (_, low), (_, high) = scale([(1, y) for y in panel.get_ylim()])
        share = TOP_ROW * most + 0.03
        top = high + (high - low) * share / (1 - share)
        panel.set_ylim(top=panel.transScale.inverted().transform((0, top))[1])
    where: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": SMALL - 1}
    for name, own in marks.items():
        edge = found[name].get_xaxis_transform()
        for mark in own:
            x, text, style = mark
            y = 1 - TOP_ROW * (rows[name].index(_look_of(mark)) + 0.5)
            found[name].plot([x], [y], transform=edge, ls="", markersize=5, mfc="none", clip_on=False, **style)
            found[name].annotate(text, (x, y), xycoords=edge, **where)


def _look_of(mark: Mark) -> tuple[str, str]:
    return mark[2]["color"], mark[2]["marker"]
