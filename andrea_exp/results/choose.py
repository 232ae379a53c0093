"""Tuning: the value with the lowest mean validation loss over the tuning seeds, per row and column."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from andrea_exp.record import Status, read_json, run_folder, status
from andrea_exp.sweep.plan import Chooser, Plan, Values


def choose_tuned(records: Path) -> Chooser:
    """A chooser that reads the tuning runs' summaries; it answers None until they have all ended.

    A value ranks behind all with fewer diverged seeds.
    """

    def choose(plan: Plan, arm: str, column: Values) -> Values | None:
        losses: dict[str, list[float | None]] = defaultdict(list)
        for cell in plan.cells:
            if cell.purpose != "tune" or cell.arm != arm or cell.column != column:
                continue
            folder = run_folder(records, cell.signature)
            state = status(folder)
            if not state.finished:
                return None
            summary = read_json(folder / "summary.json") or {}
            # Bits a byte rank like nats a token, and across tokenizers too.
            losses[json.dumps(cell.tuned)].append(summary["val/bits_per_byte"] if state is Status.done else None)
        return json.loads(min(losses, key=lambda values: _rank(losses[values])))

    return choose


def _rank(losses: list[float | None]) -> tuple[int, float]:
    """How many seeds diverged, then the mean of the others."""
    known = [loss for loss in losses if loss is not None]
    return len(losses) - len(known), statistics.fmean(known) if known else 0.0
