"""Figures from records: one style, safe for colour-blind readers, PNG and SVG. Which ones follows from the roles.

Every figure is called alike, `loss_curves(plan, records)`; `figures_of` draws all that a plan's records can fill.
A diverged run is counted and shown, never averaged, and every figure says how many seeds stand behind a point.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from andrea_exp.errors import UserError
from andrea_exp.results.figures import beside, blocks, depth, layers, losses, maps, sizes
from andrea_exp.results.figures.seen import Seen
from andrea_exp.style import STYLE
from andrea_exp.sweep.plan import Plan


@dataclass(frozen=True)
class Drawn:
    """One kind of figure: its file's name, how it is read, and what it needs to show anything."""

    name: str
    caption: str
    needs: str
    draw: Callable[[Seen], Figure | None]

    def __call__(self, plan: Plan, records: Path) -> Figure:
        """Raises UserError where the records have nothing for it to show."""
        figure = self.draw(Seen(plan, records))
        if figure is None:
            raise UserError(f"sweep {plan.name}: figure {self.name} has nothing to show; it needs {self.needs}")
        return figure


loss_curves = Drawn(
    "loss",
    "Training loss by step, a running mean over a sixtieth of each run's points; the median of an arm's done seeds in "
    "a band from least to largest; every diverged seed is a dashed line of its own that ends in a cross.",
    "runs that have logged a training loss",
    losses.loss_curves,
)
loss_by_lr = Drawn(
    "loss_by_lr",
    "Final validation loss by learning rate, mean and range over seeds, arms side by side at each value; hollow "
    "markers at the top count seeds that diverged there, a ring is the chosen value, a star its reported seeds' mean.",
    "optim.lr with two values or more, tuned or across, and runs that have ended",
    losses.loss_by_lr,
)
loss_by_size = Drawn(
    "loss_by_size",
    "Final validation loss, mean and SD over seeds, by parameters and by a run's training FLOPs; hollow markers at the "
    "top count the seeds that diverged.",
    "arms or columns whose parameters or FLOPs differ by more than 2%, and runs that have ended",
    sizes.loss_by_size,
)
stability = Drawn(
    "stability",
    "How many seeds diverged, darker for more, and how (S stuck, N not finite, A above the start); where none did, "
    "their mean validation loss.",
    "two numeric fields across, or one and a tuned optim.lr, and a run that diverged",
    maps.stability,
)
gradient_norms_by_depth = Drawn(
    "grad_norm",
    "Gradient norm of each block's MLP at the first logged step (dashed) and the last (solid), geometric mean over "
    "seeds; a diverged seed's last step is a dotted line of its own.",
    "runs that have ended, with gradient norms by block",
    blocks.gradient_norms_by_depth,
)
last_mlp_gradient = Drawn(
    "last_mlp_gradient",
    "Gradient norm of the last block's MLP before training by the number of blocks, geometric mean and range over "
    "seeds; the legend has the fitted exponents, dotted lines the predicted ones from each first point on.",
    "model.n_layers with three values or more, and ended runs that were diagnosed before training",
    depth.last_mlp_gradient,
)
stream_by_depth = Drawn(
    "stream_by_depth",
    "RMS of the residual stream after each block, before training (dashed) and at the end (solid); dotted black: "
    "growth as the square root of the block's number, from the baseline's first point.",
    "ended runs that were diagnosed",
    blocks.stream_by_depth,
)
branch_ratio = Drawn(
    "branch_ratio",
    "What a block's branches add, as a share of the stream that they are added to, before training (dashed) and at the "
    "end (solid); below the dotted tenth a block passes its input nearly unchanged.",
    "ended runs that were diagnosed",
    blocks.branch_ratio,
)
token_cosine = Drawn(
    "token_cosine",
    "Mean cosine between the tokens of a text in the stream that enters each block, before training (dashed) and at "
    "the end (solid); at 1 all tokens are alike.",
    "ended runs that were diagnosed",
    blocks.token_cosine,
)
loss_by_block = Drawn(
    "layers",
    "By how much the loss grows where a block is skipped, swapped with the next, or where predictions are read out "
    "after it: mean and range over seeds, linear within 0.01 nats and logarithmic beyond.",
    "runs that `andrea-exp specialise` has measured",
    layers.loss_by_block,
)
published_differences = Drawn(
    "published",
    "Each arm's difference to the baseline in validation loss, ours with its 95% interval beside published ones with "
    "their SDs: signs and order compare, scales do not.",
    "a published table that asks the same (results/published.yaml), and arms of it whose runs have ended",
    beside.published_differences,
)
ALL = (
    loss_curves,
    loss_by_lr,
    loss_by_size,
    stability,
    gradient_norms_by_depth,
    last_mlp_gradient,
    stream_by_depth,
    branch_ratio,
    token_cosine,
    loss_by_block,
    published_differences,
)
CAPTIONS = {drawn.name: drawn.caption for drawn in ALL}


def figures_of(plan: Plan, records: Path) -> dict[str, Figure]:
    """The figures that a plan's records can fill, by name; each run's metrics are read once."""
    seen = Seen(plan, records)
    figures = {drawn.name: drawn.draw(seen) for drawn in ALL}
    return {name: figure for name, figure in figures.items() if figure is not None}


def encoded(figure: Figure, kind: str) -> bytes:
    """The content of a figure's "png" or "svg" file: the same figure gives the same bytes."""
    out = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Writes figures into `folder` under their names, each as PNG and as SVG."""
    paths = []
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            paths.append(folder / f"{name}.{kind}")
            paths[-1].write_bytes(encoded(figure, kind))
    return paths
