"""Losses: over the steps, and over the learning rate."""

import statistics
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from andrea_exp.record import Status
from andrea_exp.results.figures.panels import (
    Look,
    Mark,
    arm_lines,
    at_top,
    few,
    finish,
    grouped,
    logarithmic,
    look,
    panels,
    proxy,
    rest,
    seeds,
    tell_counts,
    titles,
)
from andrea_exp.results.figures.seen import Seen, Trace
from andrea_exp.results.load import Run
from andrea_exp.results.table import LR, TableCell
from andrea_exp.sweep.plan import column_title

UNITS = {"val_loss": "validation loss (nats a token)", "bits_per_byte": "validation loss (bits a byte)"}
POINTS = 60  # that a curve is smoothed to, about
ABOVE_START = 2  # times the median loss at the start: what goes higher leaves the figure


def loss_curves(seen: Seen) -> Figure | None:
    """Training loss by step: the median and range of an arm's done seeds, every other run alone."""
    traces = [trace for trace in seen.traces if len(trace.loss)]
    if not traces:
        return None
    plan = seen.plan
    figure, found = panels(titles(plan), "optimizer step", "training loss (nats a token)")
    for (arm, name), own in grouped(traces, lambda t: (t.run.cell.arm, column_title(t.run.cell.column))).items():
        _loss_curve(found[name], own, look(plan.arms.index(arm))["color"])
    first = next(iter(found.values()))  # all share its axes
    first.set_yscale("log")
    least, most = (of(of(trace.loss) for trace in traces) for of in (min, max))
    first.set_ylim(0.95 * least, min(1.05 * most, ABOVE_START * statistics.median(t.loss.iloc[0] for t in traces)))
    logarithmic(first, "x")
    logarithmic(first, "y")
    tell_counts(plan, seen.reported, found)
    lines = arm_lines(plan, seen.reported, {trace.run.cell.arm for trace in traces}, marker=False)
    if any(trace.diverged for trace in traces):
        lines.append(proxy("a diverged seed", lw=0.7, ls="--", marker="x"))
    if any(not trace.run.status.finished for trace in traces):
        lines.append(proxy("a seed not done yet", lw=0.7, ls="--"))
    finish(figure, lines, f"median and range\nof n = {seeds(plan)} seeds")
    return figure


def _loss_curve(panel: Axes, own: Sequence[Trace], colour: str) -> None:
    smooth = [trace.loss.rolling(max(1, len(trace.loss) // POINTS), min_periods=1).mean() for trace in own]
    done = [curve for trace, curve in zip(own, smooth, strict=True) if trace.done]
    if done:
        wide = pd.concat(done, axis=1)  # aligned on the step
        panel.plot(wide.index, wide.median(axis=1), color=colour, lw=1.4)
        panel.fill_between(wide.index, wide.min(axis=1), wide.max(axis=1), color=colour, alpha=0.2, lw=0)
    for trace, curve in zip(own, smooth, strict=True):
        if not trace.done:
            end = "x" if trace.diverged else None
            panel.plot(curve.index, curve, "--", color=colour, lw=0.7, marker=end, markevery=[-1], markersize=5)


def loss_by_lr(seen: Seen) -> Figure | None:
    """Final validation loss by learning rate, over the tuning seeds where it is tuned, else over the reported ones."""
    plan, tuned = seen.plan, LR in seen.plan.spec.tune
    tried = plan.spec.tune.get(LR, plan.spec.across.get(LR, []))
    runs = [run for run in seen.runs if run.cell.purpose == ("tune" if tuned else "report") and run.status.finished]
    chosen = {(cell.arm, repr(cell.column)): cell for cell in seen.table.cells if LR in cell.tuned}
    runs = [run for run in runs if _beside_the_chosen(run, chosen, others=len(plan.spec.tune) > 2)]
    if len(tried) < 2 or not runs:
        return None
    n = len(plan.spec.tune["seed"]) if tuned else seeds(plan)
    figure, found = panels(titles(plan, LR), "learning rate", UNITS[seen.table.metric])
    top: dict[str, list[Mark]] = {name: [] for name in found}
    for (arm, name), own in grouped(runs, lambda r: (r.cell.arm, column_title(rest(r.cell.column, LR)))).items():
        place = plan.arms.index(arm)
        # Arms stand side by side at each value, so that none hides another.
        aside = 10 ** (0.015 * (place - (len(plan.arms) - 1) / 2))
        top[name] += _lr_line(found[name], own, seen.table.metric, look(place), aside, n)
        cell = chosen.get((arm, repr(own[0].cell.column)))
        if cell:
            top[name] += _chosen(found[name], cell, own, seen.table.metric, look(place)["color"], aside)
    rates = sorted({run.cell.config.optim.lr for run in runs})
    first = next(iter(found.values()))  # all share its axes
    logarithmic(first, "x")
    first.set_xticks(rates, [f"{rate:g}" for rate in rates])
    at_top(found, top)
    lines = [proxy(arm, **look(i)) for i, arm in enumerate(plan.arms) if arm in {run.cell.arm for run in runs}]
    lines += [proxy("k/n diverged", ls="", marker="o", mfc="none")] * any(top.values())
    if chosen:
        lines.append(proxy("chosen", ls="", marker="o", mfc="none", markersize=10))
    if any(cell.done + cell.diverged for cell in chosen.values()):
        lines.append(proxy(f"reported seeds, n = {seeds(plan)}", ls="", marker="*", markersize=9))
    finish(figure, lines, f"mean and range\nof n = {n} {'tuning ' if tuned else ''}seeds")
    return figure


def _beside_the_chosen(run: Run, chosen: Mapping[tuple[str, str], TableCell], others: bool) -> bool:
    """Whether a run has the chosen values of whatever else is tuned, so that only the learning rate differs."""
    cell = chosen.get((run.cell.arm, repr(run.cell.column)))
    return rest(run.cell.tuned, LR) == rest(cell.tuned, LR) if cell else not others


def _lr_line(panel: Axes, runs: Sequence[Run], metric: str, style: Look, aside: float, n: int) -> list[Mark]:
    """An arm's line through the values at which no seed diverged; returns what belongs at the top for the others."""
    points, top = [], []
    for rate, own in sorted(grouped(runs, lambda run: run.cell.config.optim.lr).items()):
        diverged = sum(run.status is Status.diverged for run in own)
        losses = [loss for run in own if (loss := run.number(metric)) is not None]
        if diverged:
            top.append((rate * aside, f"{diverged}/{len(own)}", style))
        elif losses:
            points.append((rate * aside, statistics.fmean(losses), min(losses), max(losses)))
            if len(losses) != n:
                few(panel, *points[-1][:2], len(losses))
    if points:
        x, mean, low, high = zip(*points, strict=True)
        panel.plot(x, mean, lw=1.1, markersize=3.5, **style)
        panel.vlines(x, low, high, color=style["color"], lw=0.9, alpha=0.7)
    return top


def _chosen(panel: Axes, cell: TableCell, tried: Sequence[Run], metric: str, colour: str, aside: float) -> list[Mark]:
    """A ring around the chosen value's tuning seeds, a star where the reported ones ended."""
    at = [run for run in tried if run.cell.tuned == cell.tuned]
    if not at:
        return []
    rate = at[0].cell.config.optim.lr * aside
    losses = [loss for run in at if run.status is Status.done and (loss := run.number(metric)) is not None]
    if len(losses) == len(at):
        panel.plot([rate], [statistics.fmean(losses)], "o", color=colour, mfc="none", markersize=10, mew=1)
    if cell.loss_mean is not None:
        panel.plot([rate], [cell.loss_mean], "*", color=colour, markersize=9, mec="white", mew=0.5, zorder=4)
    ended = cell.done + cell.diverged
    return [(rate, f"{cell.diverged}/{ended}", {"color": colour, "marker": "*"})] if cell.diverged else []
