"""Where runs diverge: a map over whatever numbers a sweep varies."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from andrea_exp.record import Status
from andrea_exp.results.figures.panels import (
    PANELS_IN_A_ROW,
    SMALL,
    finish,
    grouped,
    number,
    panels,
    proxy,
    rest,
    seeds,
)
from andrea_exp.results.figures.seen import Seen
from andrea_exp.results.load import Run
from andrea_exp.results.table import LR
from andrea_exp.style import COLOURS
from andrea_exp.sweep.plan import Cell, Plan, Values, column_title, shown

LETTERS = {"stuck": "S", "non-finite": "N", "above start": "A"}
MOST_IN_A_ROW = 6
SHARE = LinearSegmentedColormap.from_list("diverged", ("#FFFFFF", COLOURS[1]))


@dataclass(frozen=True)
class Map:
    """Which fields are the axes of the grids, with their values."""

    x: str
    y: str
    across: list[Any]
    down: list[Any]
    purpose: str  # whose runs are counted: tuning ones where x is tuned

    @classmethod
    def of(cls, plan: Plan) -> "Map | None":
        """The learning rate across where it varies, the last other number of the columns down; None without two."""
        fields = [key for key, values in plan.spec.across.items() if len(values) > 1 and all(map(_numeric, values))]
        if fields and len(rates := plan.spec.tune.get(LR, [])) > 1:
            return cls(LR, fields[-1], rates, plan.spec.across[fields[-1]], "tune")
        if len(fields) < 2:
            return None
        x = LR if LR in fields else fields[0]
        y = next(key for key in reversed(fields) if key != x)
        return cls(x, y, plan.spec.across[x], plan.spec.across[y], "report")

    def varied(self, cell: Cell) -> Values:
        return {**cell.column, **(cell.tuned if self.purpose == "tune" else {})}

    def panel(self, cell: Cell) -> str:
        return ": ".join(filter(None, (cell.arm, column_title(rest(self.varied(cell), self.x, self.y)))))

    def square(self, cell: Cell) -> tuple[int, int]:
        """Column and row of a grid."""
        varied = self.varied(cell)
        return self.across.index(varied[self.x]), self.down.index(varied[self.y])


def _numeric(value: object) -> bool:
    return value is None or number(value) is not None


def stability(seen: Seen) -> Figure | None:
    """How many seeds diverged, a grid for each arm and whatever its axes leave open; where none did, the mean loss."""
    plan, grid = seen.plan, Map.of(seen.plan)
    if grid is None:
        return None
    runs = [run for run in seen.runs if run.cell.purpose == grid.purpose and run.status.finished]
    if not any(run.status is Status.diverged for run in runs):
        return None
    names = list(dict.fromkeys(grid.panel(cell) for cell in plan.cells if cell.purpose == grid.purpose))
    columns = len(names) // len(plan.arms)
    in_a_row = columns if 1 < columns <= MOST_IN_A_ROW else PANELS_IN_A_ROW
    figure, found = panels(names, grid.x.split(".")[-1], grid.y.split(".")[-1], in_a_row=in_a_row)
    n = len(plan.spec.tune["seed"]) if grid.purpose == "tune" else seeds(plan)
    for name, panel in found.items():
        own = [run for run in runs if grid.panel(run.cell) == name]
        _grid(panel, grid, grouped(own, lambda run: grid.square(run.cell)), seen.table.metric, n)
    met = {run.summary["diverged"]["kind"] for run in runs if run.status is Status.diverged}
    square: dict[str, Any] = {"ls": "", "marker": "s", "markersize": 8, "mew": 0.5, "mec": "black"}
    lines = [proxy("none: mean loss", **square, mfc=SHARE(0.0)), proxy("all", **square, mfc=SHARE(1.0))]
    lines += [proxy(f"{letter}: {kind}", ls="") for kind, letter in LETTERS.items() if kind in met]
    finish(figure, lines, f"diverged of n = {n} {'tuning ' if grid.purpose == 'tune' else ''}seeds")
    return figure


def _grid(panel: Axes, grid: Map, runs: Mapping[tuple[int, int], Sequence[Run]], metric: str, n: int) -> None:
    share = np.full((len(grid.down), len(grid.across)), np.nan)
    for (x, y), own in runs.items():
        share[y, x] = sum(run.status is Status.diverged for run in own) / len(own)
    panel.pcolormesh(
        np.ma.masked_invalid(share), cmap=SHARE, vmin=0, vmax=1, edgecolors="black", linewidth=0.4, clip_on=False
    )
    for y, x in np.ndindex(share.shape):
        text = _text(runs.get((x, y), []), metric, n)
        panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=SMALL)
    panel.set_xticks(np.arange(len(grid.across)) + 0.5, [shown(v) for v in grid.across])
    panel.set_yticks(np.arange(len(grid.down)) + 0.5, [shown(v) for v in grid.down])
    panel.grid(visible=False)


def _text(runs: Sequence[Run], metric: str, n: int) -> str:
    if not runs:
        return "not run"
    kinds = {run.summary["diverged"]["kind"] for run in runs if run.status is Status.diverged}
    if kinds:
        diverged = sum(run.status is Status.diverged for run in runs)
        return f"{diverged}/{len(runs)} " + "".join(letter for kind, letter in LETTERS.items() if kind in kinds)
    losses = [loss for run in runs if (loss := run.number(metric)) is not None]
    mean = f"{statistics.fmean(losses):.3f}" if losses else "done"
    return mean if len(runs) == n else f"{mean}\nn = {len(runs)}"
