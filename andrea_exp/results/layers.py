"""What `andrea-exp specialise` measured of each block, from the records: a frame, two numbers a run, a figure.

Increases are in nats a token, over the loss of the whole model on the same windows.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from andrea_exp.record import LAYERS, read_json, run_folder
from andrea_exp.results.load import Run, read_runs
from andrea_exp.style import COLOURS, STYLE
from andrea_exp.sweep.plan import Plan

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# What the figure shows: the frame's column, its title, where a panel's x begins counting.
SHOWN = {"skip": "block skipped", "swap": "block swapped with the next", "lens": "read out after the block"}
LEAST_LOSS = 1e-9  # nats: a smaller increase is rounding


def increases(found: dict[str, Any]) -> dict[str, list[float | None]]:
    """By measure, one number a block: skip, attn, mlp (silenced), swap (with the next), lens (read out after it)."""

    def over(losses: Sequence[float | None] | None, blocks: int) -> list[float | None]:
        known = [None] * blocks if losses is None else list(losses)
        return [None if v is None or found["loss"] is None else v - found["loss"] for v in known]

    blocks = len(found["lens"]) - 1
    return {
        "skip": over(found["skipped"], blocks),
        **{branch: over(losses, blocks) for branch, losses in found["without"].items()},
        "swap": [*over(found["swapped"], blocks - 1), None],
        "lens": over(found["lens"][1:], blocks),
    }


def swap_ratio(run: Run, records: Path) -> float | None:
    """The perplexity with two neighbours swapped over that without: the geometric median over all pairs.

    1 where blocks are interchangeable. The median, so that the first block, which alone reads an embedding, does not
    decide for all. Its logarithm is in nats.
    """
    swaps = _known(run, records, "swap")
    return math.exp(statistics.median(swaps)) if swaps else None


def skip_spread(run: Run, records: Path) -> float | None:
    """What the most important block is worth over what the median one is; None where that is worth nothing."""
    skips = _known(run, records, "skip")
    middle = statistics.median(skips) if skips else 0.0
    return max(skips) / middle if middle > LEAST_LOSS else None


def _known(run: Run, records: Path, measure: str) -> list[float]:
    found = read_json(run_folder(records, run.cell.signature) / LAYERS)
    return [v for v in increases(found)[measure] if v is not None] if found else []


def layers_frame(plan: Plan, records: Path) -> "pd.DataFrame":
    """One row a block of each reported run that was measured: label, arm, roles, block, and `increases`."""
    import pandas as pd

    from andrea_exp.results.frames import roles

    rows = [
        {**roles(run.cell), "block": block, **{name: values[block] for name, values in by_measure.items()}}
        for run, by_measure in _measured(plan, records)
        for block in range(len(by_measure["skip"]))
    ]
    return pd.DataFrame(rows, columns=[*roles(plan.cells[0]), "block", "skip", "attn", "mlp", "swap", "lens"])


def _measured(plan: Plan, records: Path) -> Iterator[tuple[Run, dict[str, list[float | None]]]]:
    for run in read_runs(plan, records):
        found = read_json(run_folder(records, run.cell.signature) / LAYERS)
        if run.cell.purpose == "report" and found:
            yield run, increases(found)


def rows(plan: Plan, records: Path) -> list[dict[str, Any]]:
    """One entry a measured run, for machines."""
    return [
        {
            "label": run.cell.label,
            "signature": run.cell.signature,
            "swap_ratio": swap_ratio(run, records),
            "skip_spread": skip_spread(run, records),
            **by_measure,
        }
        for run, by_measure in _measured(plan, records)
    ]


def to_rich(plan: Plan, records: Path) -> Table:
    """A line a run: what swapping and skipping cost, and which block is worth most."""
    table = Table(box=None, header_style="bold", pad_edge=False, title="loss increase in nats a token", title_style="")
    table.add_column("run", no_wrap=True)
    for name in ("skip: median", "largest", "of block", "over median", "swap: median", "swap: perplexity"):
        table.add_column(name, justify="right")
    for row in rows(plan, records):
        skips, swaps = ([v for v in row[k] if v is not None] for k in ("skip", "swap"))
        skipped = ["", "", ""]
        if skips:
            skipped = [f"{statistics.median(skips):+.3f}", f"{max(skips):+.3f}", str(row["skip"].index(max(skips)))]
        spread = "" if row["skip_spread"] is None else f"{row['skip_spread']:.1f}"
        swap = [f"{statistics.median(swaps):+.4f}", f"x{row['swap_ratio']:.3f}"] if swaps else ["", ""]
        table.add_row(row["label"], *skipped, spread, *swap)
    return table


def loss_by_block(plan: Plan, records: Path) -> "Figure":
    """Loss increase by block, a row of panels a column of the sweep: skipped, swapped, read out after it.

    An arm's mean over seeds in a band from least to largest; n is the number of runs measured.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from andrea_exp.results.frames import frames_by_place

    places = frames_by_place(plan, layers_frame(plan, records))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2 * len(plan.columns)), layout="constrained")
        grid = figure.subplots(len(plan.columns), len(SHOWN), squeeze=False)
        for place, measure in ((p, m) for p in range(len(plan.columns)) for m in SHOWN):
            axes = grid[place, list(SHOWN).index(measure)]
            for colour, arm in zip(COLOURS * len(plan.arms), plan.arms, strict=False):
                if (arm, place) in places:
                    wide = places[arm, place].pivot(index="block", columns="label", values=measure).dropna(how="all")
                    label = f"{arm}, n={wide.shape[1]}"
                    axes.plot(wide.index, wide.mean(axis=1), "-o", ms=3, color=colour, label=label)
                    axes.fill_between(wide.index, wide.min(axis=1), wide.max(axis=1), color=colour, alpha=0.2, lw=0)
            axes.set_title(SHOWN[measure])
            axes.set_xlabel("block")
        for first in grid[:, 0]:
            first.set_ylabel("loss increase (nats a token)")
        grid[0, -1].legend(frameon=False, fontsize=8)
    return figure
