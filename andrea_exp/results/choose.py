"""Tuning: the value with the lowest mean validation loss over the tuning seeds, per row and column."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from andrea_exp.record import Status, read_json, run_folder, status
from andrea_exp.sweep.plan import Chooser, Plan, Values


def choose_tuned(records: Path) -> Chooser:
    """A chooser that reads the tuning runs' summaries; it answers None until they have all ended.

    A value with a diverged or failed seed ranks last.
    """

    def choose(plan: Plan, arm: str, column: Values) -> Values | None:
        losses: dict[str, list[float]] = defaultdict(list)
        for cell in plan.cells:
            if cell.purpose != "tune" or cell.arm != arm or cell.column != column:
                continue
            folder = run_folder(records, cell.signature)
            state = status(folder)
            if not state.finished and state is not Status.failed:
                return None
            summary = read_json(folder / "summary.json") or {}
            loss = summary.get("val/loss") if state is Status.done else None
            losses[json.dumps(cell.tuned)].append(float("inf") if loss is None else loss)
        return json.loads(min(losses, key=lambda values: statistics.fmean(losses[values])))

    return choose
