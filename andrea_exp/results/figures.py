"""Figures from frames: one style, safe for colour-blind readers, PNG and SVG."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from andrea_exp.results.frames import frames_by_place, metrics_frame
from andrea_exp.results.published import of_sweep, rows
from andrea_exp.results.table import AblationTable
from andrea_exp.style import COLOURS, STYLE
from andrea_exp.sweep.plan import Plan, shown

PANELS_IN_A_ROW = 4
CAPTIONS = {
    "loss": "Training loss by optimizer step: an arm's median over seeds, in a band from its least to its largest.",
    "grad_norm": "Gradient norm of each block's MLP against its depth: the geometric mean over seeds, at the first "
    "step (dashed) and the last (solid).",
}
MARKERS = ("o", "s", "^", "D", "v", "P")


def loss_curves(plan: Plan, records: Path) -> Figure:
    """Training loss by step, one panel a column: an arm's median over seeds in a band from least to largest.

    A step where a seed has no finite loss is drawn without that seed.
    """
    frame = metrics_frame(plan, records, ["train/loss"]).dropna(subset=["value"])
    figure, panels = _panels(plan, "optimizer step", "training loss (nats a token)")
    places = frames_by_place(plan, frame)
    for place, panel in enumerate(panels):
        for colour, arm in zip(_cycle(COLOURS), plan.arms, strict=False):
            runs = places.get((arm, place), frame[:0])
            wide = runs.pivot_table(index="step", columns="label", values="value")
            if wide.empty:
                continue
            smooth = wide.rolling(max(1, len(wide) // 60), min_periods=1).mean()
            panel.plot(smooth.index, smooth.median(axis=1), color=colour, label=arm)
            panel.fill_between(smooth.index, smooth.min(axis=1), smooth.max(axis=1), color=colour, alpha=0.2, lw=0)
    seeds = math.prod(map(len, plan.spec.repeat.values()))
    _legend(panels, f"median and range\nof {seeds} seeds")
    return figure


def gradient_norms_by_depth(plan: Plan, records: Path) -> Figure:
    """Gradient norm of each block's MLP against its depth, at the first step (dashed) and the last (solid).

    The geometric mean over seeds; a run that ended in NaN shows its first step only.
    """
    frame = metrics_frame(plan, records, ["grad_norm/block_"])
    last = plan.cells[0].config.train.steps
    frame = frame[frame["metric"].str.endswith("/mlp") & (frame["value"] > 0)]
    frame = frame[(frame["step"] > 0) | (last == 0)]  # step 0 has another batch: it serves untrained runs alone
    frame = frame.assign(block=frame["metric"].str.extract(r"block_(\d+)/", expand=False).astype(int))
    figure, panels = _panels(plan, "block", "gradient norm of the MLP")
    places = frames_by_place(plan, frame)
    for place, panel in enumerate(panels):
        for colour, arm in zip(_cycle(COLOURS), plan.arms, strict=False):
            runs = places.get((arm, place), frame[:0])
            ends = ((runs["step"].min(), "--", None), (last, "-", arm))
            for step, line, label in ends:
                at = runs[runs["step"] == step].groupby("block")["value"]
                mean = at.apply(lambda v: np.exp(np.log(v).mean()))
                if len(mean):
                    panel.plot(mean.index, mean, line, color=colour, label=label, marker=".")
        panel.set_yscale("log")
    _legend(panels, "dashed: step 1; solid: last")
    return figure


def published_differences(table: AblationTable) -> Figure:
    """Each arm's difference to the baseline, ours and in every published table that asks the same: on other scales."""
    found = rows(table, of_sweep(table.name))
    names: list[str | None] = list(dict.fromkeys(row.table for row in found))
    theirs = {row.arm for row in found if row.table is not None}
    arms = [arm for arm in table.arms if arm in theirs]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 1.2 + 0.5 * len(arms)), layout="constrained")
        axes = figure.subplots()
    for i, (name, colour, marker) in enumerate(zip(names, _cycle(COLOURS), _cycle(MARKERS), strict=False)):
        own = [row for row in found if row.table == name and row.arm in theirs]
        y = [arms.index(row.arm) + 0.12 * (i - (len(names) - 1) / 2) for row in own]
        axes.plot([row.difference for row in own], y, marker, color=colour, label=name or "ours [95% CI]")
        for row, height in zip(own, y, strict=True):
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [height, height], "-", color=colour)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(arms)), arms, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"difference to {table.baseline} (nats a token)\npublished: another size, text and objective")
    _legend([axes], "")
    return figure


def figures_of(plan: Plan, records: Path) -> dict[str, Figure]:
    """The figures that a plan's runs can fill, by name."""
    return {"loss": loss_curves(plan, records), "grad_norm": gradient_norms_by_depth(plan, records)}


def save_figures(plan: Plan, records: Path, folder: Path) -> list[Path]:
    """Writes all figures of a plan into `folder`, each as PNG and as SVG."""
    paths = []
    for name, figure in figures_of(plan, records).items():
        for suffix in ("png", "svg"):
            paths.append(folder / f"{name}.{suffix}")
            figure.savefig(paths[-1])
    return paths


def _panels(plan: Plan, x: str, y: str) -> tuple[Figure, list[Axes]]:
    """A figure with a panel a column, a few in a row."""
    across = min(PANELS_IN_A_ROW, len(plan.columns))
    rows = -(-len(plan.columns) // across)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 4 * across, 3.4 * rows), layout="constrained")
        grid = figure.subplots(rows, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(plan.columns) :]:
        axes.set_axis_off()
    panels = list(grid.flat[: len(plan.columns)])
    for column, panel in zip(plan.columns, panels, strict=True):
        panel.set_title(", ".join(f"{k.split('.')[-1]} = {shown(v)}" for k, v in column.items()))
        panel.set_xlabel(x)
    for first in grid[:, 0]:
        first.set_ylabel(y)
    return figure, panels


def _legend(panels: list[Axes], title: str) -> None:
    """One for all panels, beside the first row, where it covers no line."""
    handles = {text: line for panel in panels for line, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    where: Any = {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": 8}
    beside = panels[min(len(panels), PANELS_IN_A_ROW) - 1]
    legend = beside.legend(list(handles.values()), list(handles), title=title, frameon=False, **where)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with dollars is no formula


def _cycle(colours: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from colours
