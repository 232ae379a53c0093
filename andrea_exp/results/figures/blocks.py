"""What happens from block to block: one function, several of the metrics that a diagnosis logs."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from andrea_exp.results.figures.depth import N_LAYERS
from andrea_exp.results.figures.panels import (
    Look,
    arm_lines,
    finish,
    grouped,
    logarithmic,
    look,
    panels,
    proxy,
    seeds,
    tell_counts,
    titles,
)
from andrea_exp.results.figures.seen import Row, Seen, Trace, finite
from andrea_exp.sweep.plan import column_title

Values = dict[int, float]  # block's number -> value


@dataclass(frozen=True)
class Profile:
    """A metric that each block logs, and how to draw it."""

    metric: re.Pattern[str]  # its group is the block's number; none for what comes after the last
    y: str
    first: int = 1  # the number of the first block; what comes after the last is one more than that
    guide: tuple[str, Callable[[Values], list[float]]] | None = None  # from the baseline's own profile at the start
    at_first_step: bool = False  # the start is the first step's row, else that of step 0
    log_x: bool = False
    log_y: bool = True


GRADIENT = Profile(re.compile(r"grad_norm/block_(\d+)/mlp"), "gradient norm of the MLP", at_first_step=True)
STREAM = Profile(
    re.compile(r"stream/rms/(?:block_(\d+)|final)"),
    "RMS of the stream after the block",
    first=0,  # what enters a block has left the one before
    guide=("square root of the block's number", lambda own: [own[min(own)] * (n / min(own)) ** 0.5 for n in own]),
    log_x=True,
)
BRANCH = Profile(
    re.compile(r"branch/ratio/block_(\d+)/.+"),
    "branch RMS / stream RMS",
    guide=("a tenth", lambda own: [0.1] * len(own)),
)
COSINE = Profile(
    re.compile(r"stream/token_cosine/block_(\d+)"),
    "mean cosine between tokens",
    guide=("all tokens alike", lambda own: [1.0] * len(own)),
    log_y=False,
)


def profile(what: Profile, seen: Seen) -> Figure | None:
    """A metric by block: at the start (dashed) over all seeds, at the end (solid) over those that are done.

    A diverged seed's end is a dotted line of its own.
    """
    ended = [trace for trace in seen.traces if trace.run.status.finished]
    drawn = [trace for trace in ended if _by_block(what, _start(what, trace))]
    if not drawn:
        return None
    plan = seen.plan
    figure, found = panels(titles(plan), "block", what.y, share_x=N_LAYERS not in plan.spec.across)
    lines = arm_lines(plan, seen.reported, {trace.run.cell.arm for trace in drawn})
    for (arm, name), own in grouped(drawn, lambda t: (t.run.cell.arm, column_title(t.run.cell.column))).items():
        _ends(found[name], what, own, look(plan.arms.index(arm)))
        if what.guide and arm == plan.spec.baseline:
            at_start = _over_seeds(what, [_start(what, trace) for trace in own])
            if at_start:
                found[name].plot(list(at_start), what.guide[1](at_start), color="black", lw=1, ls=":", zorder=1)
    for panel in found.values():
        if what.log_x:
            logarithmic(panel, "x")
        else:
            panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if what.log_y:
        logarithmic(next(iter(found.values())), "y")  # all share it
    tell_counts(plan, seen.reported, found)
    mean = "geometric mean" if what.log_y else "mean"
    finish(figure, lines + _kinds(what, drawn), f"{mean}\nof n = {seeds(plan)} seeds")
    return figure


gradient_norms_by_depth = partial(profile, GRADIENT)
stream_by_depth = partial(profile, STREAM)
branch_ratio = partial(profile, BRANCH)
token_cosine = partial(profile, COSINE)


def _start(what: Profile, trace: Trace) -> Row:
    return trace.first if what.at_first_step else trace.untrained


def _by_block(what: Profile, row: Row) -> Values:
    """Block's number -> the mean over its branches."""
    found = [(match[1], row[name]) for name in row if (match := what.metric.fullmatch(name))]
    after = 1 + max((int(block) for block, _ in found if block), default=-1)
    usable = [(block, value) for block, value in found if finite(value) and (value > 0 or not what.log_y)]
    by_number = grouped(usable, lambda u: what.first + (after if u[0] is None else int(u[0])))
    return {n: statistics.fmean(value for _, value in own) for n, own in sorted(by_number.items()) if n > 0}


def _over_seeds(what: Profile, rows: Sequence[Row]) -> Values:
    """The mean over seeds, geometric where the axis is in logarithms, of the blocks that all seeds have."""
    each = [_by_block(what, row) for row in rows]
    mean = statistics.geometric_mean if what.log_y else statistics.fmean
    return {number: mean([values[number] for values in each]) for number in each[0] if all(number in v for v in each)}


def _ends(panel: Axes, what: Profile, own: Sequence[Trace], style: Look) -> None:
    _line(panel, _over_seeds(what, [_start(what, trace) for trace in own]), style, "--")
    trained = [trace for trace in own if trace.run.cell.config.train.steps]
    done = [trace.last for trace in trained if trace.done]
    if done:
        _line(panel, _over_seeds(what, done), style, "-")
    for trace in trained:
        if trace.diverged:
            _line(panel, _by_block(what, trace.last), {**style, "mfc": "white"}, ":")


def _line(panel: Axes, values: Values, style: Look, line: str) -> None:
    every = max(1, len(values) // 8)
    panel.plot(list(values), list(values.values()), line, lw=1.2, markersize=3.5, markevery=every, **style)


def _kinds(what: Profile, drawn: Sequence[Trace]) -> list[Line2D]:
    """What the kinds of lines mean, for those kinds that there are."""
    trained = [trace for trace in drawn if trace.run.cell.config.train.steps]
    start = "at the first logged step" if what.at_first_step and trained else "before training"
    kinds = [proxy(start, ls="--")]
    kinds += [proxy("at the last step", ls="-")] * any(trace.done for trace in trained)
    kinds += [proxy("a diverged seed's last", ls=":", marker="o", mfc="white")] * any(t.diverged for t in trained)
    return kinds + ([proxy(what.guide[0], ls=":", lw=1)] if what.guide else [])
