"""What `andrea-exp specialise` measured of each block, from the records: a frame, and two numbers a run.

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
from andrea_exp.sweep.plan import Plan

if TYPE_CHECKING:
    import pandas as pd

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
    swaps = _all(run, records, "swap")
    return math.exp(statistics.median(swaps)) if swaps else None


def skip_spread(run: Run, records: Path) -> float | None:
    """What the most important block is worth over what the median one is; None where that is worth nothing."""
    skips = _all(run, records, "skip")
    middle = statistics.median(skips) if skips else 0.0
    return max(skips) / middle if middle > LEAST_LOSS else None


def _all(run: Run, records: Path, measure: str) -> list[float]:
    """One number a block, or a pair of neighbours; none at all where one of them is not finite."""
    found = (increases_of(run, records) or {}).get(measure, [])[: -1 if measure == "swap" else None]
    return [v for v in found if v is not None] if None not in found else []


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


def increases_of(run: Run, records: Path) -> dict[str, list[float | None]] | None:
    """The `increases` of a run; None where nothing measured it."""
    found = read_json(run_folder(records, run.cell.signature) / LAYERS)
    return increases(found) if found else None


def _measured(plan: Plan, records: Path) -> Iterator[tuple[Run, dict[str, list[float | None]]]]:
    for run in read_runs(plan, records):
        if run.cell.purpose == "report" and (found := increases_of(run, records)):
            yield run, found


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
    found = rows(plan, records)
    table.add_column("run", overflow="fold", min_width=min(24, max((len(row["label"]) for row in found), default=0)))
    for name in ("skip: median", "largest", "of block", "over median", "swap: median", "swap: perplexity"):
        table.add_column(name, justify="right", overflow="fold")
    for row in found:
        skips, swaps = ([v for v in row[k] if v is not None] for k in ("skip", "swap"))
        skipped = ["", "", ""]
        if skips:
            which = str(row["skip"].index(max(skips)) + 1)  # blocks count from 1, as in the figure
            skipped = [f"{statistics.median(skips):+.3f}", f"{max(skips):+.3f}", which]
        spread = "" if row["skip_spread"] is None else f"{row['skip_spread']:.1f}"
        swap = [f"{statistics.median(swaps):+.4f}", f"x{row['swap_ratio']:.3f}"] if swaps else ["", ""]
        table.add_row(row["label"], *skipped, spread, *swap)
    return table
