"""How the last block's gradient goes with the number of blocks, beside what theory says."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from andrea_exp.config import Init, NormPlacement
from andrea_exp.results.figures.panels import (
    Look,
    Mark,
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
)
from andrea_exp.results.figures.seen import Seen, Trace, finite
from andrea_exp.results.load import last_mlp_gradient as last_mlp
from andrea_exp.results.stats import log_log_slopes, paired_interval
from andrea_exp.sweep.plan import Cell, Plan, column_title

N_LAYERS = "model.n_layers"
LEAST_DEPTHS = 3
# Xiong 2020, theorem 1, under Xavier: the last MLP's gradient before training goes as this power of the depth.
XIONG = {NormPlacement.pre: -0.5, NormPlacement.post: 0.0}

Curve = dict[int, float | None]  # depth -> gradient norm, None where it is not finite


def last_mlp_gradient(seen: Seen) -> Figure | None:
    """Gradient norm of the last block's MLP before training by the number of blocks: geometric mean over seeds."""
    plan = seen.plan
    swept = N_LAYERS in plan.spec.across or any(N_LAYERS in arm for arm in plan.spec.compare.values())
    traces = [t for t in seen.traces if t.run.status.finished and any("/mlp" in name for name in t.untrained)]
    depths = sorted({_depth(trace.run.cell) for trace in traces})
    if not swept or len(depths) < LEAST_DEPTHS or not any(map(_value, traces)):
        return None
    names = list(dict.fromkeys(_panel(cell) for cell in plan.cells))
    series = list(dict.fromkeys(_series(plan, cell) for cell in plan.cells))
    figure, found = panels(names, "blocks", "gradient norm of the last MLP")
    marks: dict[str, list[Mark]] = {name: [] for name in names}
    lines = []
    for (name, label), own in grouped(traces, lambda t: (_panel(t.run.cell), _series(plan, t.run.cell))).items():
        style = look(series.index(label))
        curves = _curves(own)
        marks[name] += _draw(found[name], curves, style, _predicted(own[0].run.cell), seeds(plan))
        title = ", ".join(filter(None, (label, name if len(names) > 1 else "")))
        lines.append(proxy(": ".join(filter(None, (title, _exponent(curves, seeds(plan))))), **style))
    first = next(iter(found.values()))  # all share its axes
    logarithmic(first, "x")
    logarithmic(first, "y")
    first.set_xticks(depths, [str(depth) for depth in depths])
    at_top(found, marks)
    lines += [proxy("k/n not finite", ls="", marker="o", mfc="none")] * any(marks.values())
    lines.append(proxy("Xiong 2020: post flat, pre L^-0.5", ls=":"))
    finish(figure, lines, f"exponent of the depth L [95% CI]\nover n = {seeds(plan)} seeds")
    return figure


def _depth(cell: Cell) -> int:
    return cell.config.model.n_layers


def _value(trace: Trace) -> float | None:
    value = last_mlp(trace.untrained)
    return value if finite(value) and value else None


def _panel(cell: Cell) -> str:
    """Untrained models differ in what shapes them alone: a learning rate is no panel of its own."""
    shaping = [key for key in cell.column if not key.startswith(("optim.", "train."))]
    return column_title({key: cell.column[key] for key in shaping if key != N_LAYERS})


def _series(plan: Plan, cell: Cell) -> str:
    """Which line a run is a point of: its arm's, or where arms differ in depth, that of what else they set."""
    own = plan.spec.compare[cell.arm]
    return cell.arm if N_LAYERS not in own else column_title(rest(own, N_LAYERS)) or "all arms"


def _curves(own: Sequence[Trace]) -> list[Curve]:
    """One a seed."""
    by_seed = grouped(own, lambda trace: repr(trace.run.cell.repeat))
    return [{_depth(t.run.cell): _value(t) for t in traces} for traces in by_seed.values()]


def _predicted(cell: Cell) -> float | None:
    model = cell.config.model
    return XIONG.get(model.norm_placement) if model.init is Init.xavier and model.residual else None


def _draw(panel: Axes, curves: Sequence[Curve], style: Look, predicted: float | None, planned: int) -> list[Mark]:
    """A line through the depths at which all seeds have a norm; returns what belongs at the top for the others."""
    at = {depth: [c[depth] for c in curves if depth in c] for depth in sorted({d for curve in curves for d in curve})}
    known = {depth: [v for v in values if v is not None] for depth, values in at.items() if None not in values}
    if known:
        x, mean = np.array(list(known)), np.array([np.exp(np.log(values).mean()) for values in known.values()])
        panel.plot(x, mean, lw=1.2, markersize=4, **style)
        panel.vlines(x, *zip(*((min(v), max(v)) for v in known.values()), strict=True), color=style["color"], lw=0.9)
        for depth, y in zip(known, mean, strict=True):
            if len(known[depth]) < planned:
                few(panel, depth, y, len(known[depth]))
        if predicted is not None:
            panel.plot(x, mean[0] * (x / x[0]) ** predicted, ":", lw=1.2, color=style["color"], zorder=1)
    return [(depth, f"{v.count(None)}/{len(v)}", style) for depth, v in at.items() if None in v]


def _exponent(curves: Sequence[Curve], planned: int) -> str:
    """The mean slope over seeds on logarithms of both, with its t interval."""
    slopes = log_log_slopes([(d, v) for d, v in sorted(curve.items()) if v is not None] for curve in curves)
    if not slopes:
        return ""
    low, high = paired_interval(slopes)
    interval = "" if low is None or high is None else f" [{low:z.2f}, {high:z.2f}]"
    return f"L^{np.mean(slopes):z.2f}{interval}" + f" (n = {len(slopes)})" * (len(slopes) < planned)
